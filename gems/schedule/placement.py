"""Placement of stages: the single place that maps a direction and a stage to a rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of one pipeline by direction and stage: `ranks[direction][stage]`.

    Ranks here are places inside one pipeline, 0 to `num_ranks` - 1. With `replicas` copies of the
    pipeline, world rank = replica x num_ranks + rank.

    `predecessors[s]` has the stages whose outputs stage s reads, in ascending order, and
    `successors[s]` those that read its output. Stages form a chain unless predecessors are given.
    Only stage 0 reads no other stage (it reads the data), and only the output of the last stage is
    read by none (it makes the loss).

    Raises:
        ValueError: `predecessors` do not form such a graph.
    """

    num_ranks: int
    ranks: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...] = ()
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _held: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        predecessors = self.predecessors or _chain(self.num_stages)
        object.__setattr__(self, "predecessors", predecessors)
        object.__setattr__(self, "successors", _successors(predecessors, self.num_stages))
        stages: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ranks)]
        places = sorted(
            (stage, direction, rank)
            for direction, ranks in enumerate(self.ranks)
            for stage, rank in enumerate(ranks)
        )
        for stage, direction, rank in places:
            if 0 <= rank < self.num_ranks:
                stages[rank].append((direction, stage))
        object.__setattr__(self, "_held", tuple(map(tuple, stages)))

    @property
    def num_stages(self) -> int:
        """Number of stages into which the model is cut."""
        return len(self.ranks[0])

    @property
    def num_directions(self) -> int:
        """1, or 2 if the pipeline runs both ways with a weight copy for each."""
        return len(self.ranks)

    @property
    def is_chain(self) -> bool:
        """Whether each stage reads the one before it, as the layers of a model do."""
        return self.predecessors == _chain(self.num_stages)

    @property
    def sums_by_stage(self) -> bool:
        """Whether each stage's gradients are summed on their own; otherwise a rank's together.

        In two directions a sum needs both ranks of a pair, and one of them ends last. The stages of
        a graph are small.
        """
        return self.num_directions == 1 and self.is_chain

    def rank_of(self, direction: int, stage: int) -> int:
        """Return the rank that runs `stage` in `direction`."""
        return self.ranks[direction][stage]

    def is_received(self, direction: int, stage: int) -> bool:
        """Return whether a stage receives its inputs in a message.

        Other inputs come from a stage on the same rank, or are the images of the step.
        """
        return stage > 0 and self.rank_of(direction, stage - 1) != self.rank_of(direction, stage)

    def stages_on(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the (direction, stage) pairs that `rank` holds, by stage and then direction."""
        return self._held[rank]

    def lowest_stage(self, rank: int) -> int:
        """Return the lowest stage on `rank`, which names its gradient reduction."""
        return min(stage for _, stage in self.stages_on(rank))

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the pipeline, including `rank`, that hold copies of the same stages.

        For two directions this is the pair {r, P-1-r} (GEMS, section "layout"): the same two ranks
        hold both stages, so one fused all-reduce serves both.
        """
        stages = {stage for _, stage in self.stages_on(rank)}
        return tuple(sorted({row[stage] for row in self.ranks for stage in stages}))

    def reduce_group(self, rank: int, num_replicas: int) -> tuple[int, ...]:
        """Return the world ranks in all replicas that sum their gradients with `rank`."""
        return tuple(
            replica * self.num_ranks + peer
            for replica in range(num_replicas)
            for peer in self.peers_of(rank)
        )


def _chain(num_stages: int) -> tuple[tuple[int, ...], ...]:
    return ((), *((stage,) for stage in range(num_stages - 1)))


def _successors(
    predecessors: tuple[tuple[int, ...], ...], num_stages: int
) -> tuple[tuple[int, ...], ...]:
    if len(predecessors) != num_stages:
        raise ValueError(f"predecessors of {len(predecessors)} stages, and there are {num_stages}")
    successors: list[list[int]] = [[] for _ in predecessors]
    for stage, read in enumerate(predecessors):
        if list(read) != sorted(set(read)) or any(not 0 <= other < stage for other in read):
            raise ValueError(
                f"stage {stage} reads {list(read)}, which must be lower stages, ascending"
            )
        if bool(read) != bool(stage):
            raise ValueError(f"stage {stage} reads {list(read)}: stage 0 alone reads the data")
        for other in read:
            successors[other].append(stage)
    for stage, readers in enumerate(successors):
        if bool(readers) == (stage == num_stages - 1):
            raise ValueError(
                f"stage {stage} is read by {readers}: the last stage alone makes the loss"
            )
    return tuple(map(tuple, successors))


def linear(num_ranks: int) -> Placement:
    """Place stage s on rank s."""
    return Placement(num_ranks, (tuple(range(num_ranks)),))


def bidirectional(num_ranks: int) -> Placement:
    """Place stage s on rank s in direction 0 (down) and on rank P-1-s in direction 1 (up)."""
    down = tuple(range(num_ranks))
    return Placement(num_ranks, (down, down[::-1]))


def looped(num_ranks: int, chunks: int) -> Placement:
    """Place stage s on rank s mod P.

    Every rank holds `chunks` stages (Narayanan et al. 2021, section 2.2).
    """
    return Placement(num_ranks, (tuple(range(num_ranks)) * chunks,))


def wave(num_ranks: int, chunks: int) -> Placement:
    """Place stages in a zig-zag, down the ranks and up again, `chunks` times.

    Two consecutive stages at a turn are on one rank, so no transfer is needed. Source: Hanayo (Liu
    et al. 2023, section 3).
    """
    down = tuple(range(num_ranks))
    return Placement(
        num_ranks, (tuple(rank for chunk in range(chunks) for rank in down[:: (-1) ** chunk]),)
    )


def v(num_ranks: int) -> Placement:
    """Place stage s on rank s, and stage 2P-1-s on the same rank.

    This is a wave of two (Qi et al. 2024, section 3).
    """
    return wave(num_ranks, 2)

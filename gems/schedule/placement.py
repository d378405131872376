"""Placement of stages: the single place that maps a direction and a stage to a rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of one pipeline by direction and stage: `ranks[direction][stage]`.

    Ranks here are places inside one pipeline, 0 to `num_ranks` - 1. With `replicas` copies of the
    pipeline, world rank = replica x num_ranks + rank.

    Stages form a chain, unless `feeders` lists, for each stage, the lower stages whose outputs it
    reads, in ascending order. In such a graph only stage 0 reads no other stage (it reads the
    data), and only the output of the last stage is read by none (it makes the loss).

    Raises:
        ValueError: `feeders` do not form such a graph.
    """

    num_ranks: int
    ranks: tuple[tuple[int, ...], ...]
    feeders: tuple[tuple[int, ...], ...] | None = None
    _held: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)
    _users: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_users", () if self.feeders is None else _users_of(self.feeders, self.num_stages)
        )
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ranks)]
        places = sorted(
            (stage, way, rank)
            for way, row in enumerate(self.ranks)
            for stage, rank in enumerate(row)
        )
        for stage, way, rank in places:
            if 0 <= rank < self.num_ranks:
                held[rank].append((way, stage))
        object.__setattr__(self, "_held", tuple(map(tuple, held)))

    @property
    def num_stages(self) -> int:
        """Number of stages into which the model is cut."""
        return len(self.ranks[0])

    @property
    def num_directions(self) -> int:
        """1, or 2 if the pipeline runs both ways with a weight copy for each."""
        return len(self.ranks)

    @property
    def is_chain_one_way(self) -> bool:
        """Whether stages form a chain in one direction, so that no two ranks share a stage."""
        return self.num_directions == 1 and self.feeders is None

    def rank_of(self, direction: int, stage: int) -> int:
        """Return the rank that runs `stage` in `direction`."""
        return self.ranks[direction][stage]

    def stages_on(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the (direction, stage) pairs that `rank` holds, by stage and then direction."""
        return self._held[rank]

    def feeders_of(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose outputs a stage reads, in ascending order."""
        if self.feeders is None:
            return (stage - 1,) if stage else ()
        return self.feeders[stage]

    def users_of(self, stage: int) -> tuple[int, ...]:
        """Return the stages that read the output of a stage, in ascending order."""
        if self.feeders is None:
            return (stage + 1,) if stage + 1 < self.num_stages else ()
        return self._users[stage]

    def lowest_stage(self, rank: int) -> int:
        """Return the lowest stage on `rank`, which names its gradient reduction."""
        return min(stage for _, stage in self.stages_on(rank))

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the pipeline, including `rank`, that hold copies of the same stages.

        For two directions this is the pair {r, P-1-r} (GEMS, section "layout"): the same two ranks
        hold both stages, so one fused all-reduce serves both.
        """
        mine = {stage for _, stage in self.stages_on(rank)}
        return tuple(sorted({row[stage] for row in self.ranks for stage in mine}))

    def reduce_group(self, rank: int, num_replicas: int) -> tuple[int, ...]:
        """Return the world ranks in all replicas that sum their gradients with `rank`."""
        return tuple(
            replica * self.num_ranks + peer
            for replica in range(num_replicas)
            for peer in self.peers_of(rank)
        )


def _users_of(feeders: tuple[tuple[int, ...], ...], num_stages: int) -> tuple[tuple[int, ...], ...]:
    if len(feeders) != num_stages:
        raise ValueError(f"feeders are those of {len(feeders)} stages, and there are {num_stages}")
    users: list[list[int]] = [[] for _ in feeders]
    for stage, some in enumerate(feeders):
        if list(some) != sorted(set(some)) or any(not 0 <= feeder < stage for feeder in some):
            raise ValueError(
                f"stage {stage} reads {list(some)}, which must be lower stages, ascending"
            )
        if bool(some) != bool(stage):
            raise ValueError(f"stage {stage} reads {list(some)}: stage 0 alone reads the data")
        for feeder in some:
            users[feeder].append(stage)
    for stage, readers in enumerate(users):
        if bool(readers) == (stage == num_stages - 1):
            raise ValueError(
                f"stage {stage} is read by {readers}: the last stage alone makes the loss"
            )
    return tuple(map(tuple, users))


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

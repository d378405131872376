"""Where a stage lives: the one place that knows which rank holds which stage in which direction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks of one pipeline by direction and stage: `ranks[direction][stage]`.

    Ranks here are places inside one pipeline, 0 to `num_ranks` - 1. With `replicas` copies of the pipeline, world
    rank = replica x num_ranks + rank.
    """

    num_ranks: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages that the model is cut into."""
        return len(self.ranks[0])

    @property
    def num_directions(self) -> int:
        """1, or 2 where the pipeline runs both ways with a weight copy for each."""
        return len(self.ranks)

    def rank_of(self, direction: int, stage: int) -> int:
        """Gives the rank that runs `stage` in `direction`."""
        return self.ranks[direction][stage]

    def stages_on(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Gives the (direction, stage) pairs that `rank` holds, by stage and then direction."""
        held = [
            (direction, stage)
            for direction, row in enumerate(self.ranks)
            for stage, holder in enumerate(row)
            if holder == rank
        ]
        return tuple(sorted(held, key=lambda pair: (pair[1], pair[0])))

    def lowest_stage(self, rank: int) -> int:
        """Gives the lowest stage on `rank`, which names its gradient reduction."""
        return min(stage for _, stage in self.stages_on(rank))

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Gives the ranks of the pipeline, `rank` among them, that hold copies of the same stages.

        For two directions that is the pair {r, P-1-r} (GEMS, section "layout"): the same two ranks hold both
        stages, so one fused all-reduce serves the two.
        """
        mine = {stage for _, stage in self.stages_on(rank)}
        return tuple(
            other for other in range(self.num_ranks) if mine & {stage for _, stage in self.stages_on(other)}
        )

    def reduce_group(self, rank: int, num_replicas: int) -> tuple[int, ...]:
        """Gives the world ranks whose gradients are summed with those of `rank`, in every replica."""
        return tuple(
            replica * self.num_ranks + peer for replica in range(num_replicas) for peer in self.peers_of(rank)
        )


def linear(num_ranks: int) -> Placement:
    """Places stage s on rank s."""
    return Placement(num_ranks, (tuple(range(num_ranks)),))


def bidirectional(num_ranks: int) -> Placement:
    """Places stage s on rank s in direction 0 (down) and on rank P-1-s in direction 1 (up)."""
    down = tuple(range(num_ranks))
    return Placement(num_ranks, (down, down[::-1]))

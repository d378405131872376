"""The shortest step there is, by trying every order of every rank's actions; for tiny steps only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gems.schedule.costs import StageCosts
from gems.schedule.placement import Placement

# Of each micro-batch, the operations of its chain that have run and the set of its weight
# gradients.
Progress = tuple[tuple[int, int], ...]
Times = tuple[
    float, ...
]  # until when each rank is busy, then the last end of each micro-batch's chain


def least_span(
    costs: StageCosts, placement: Placement, counts: Sequence[int], cap: float, delay: float = 0.0
) -> float:
    """Return the span of the shortest step with a split backward under a cap.

    Action by action, each on the end of its rank's list; of states with the same progress only
    those are kept of which no other is earlier in everything.
    """
    ways = [way for way, count in enumerate(counts) for _ in range(count)]
    num_ranks = placement.num_ranks
    states: dict[Progress, list[Times]] = {
        ((0, 0),) * len(ways): [(0.0,) * (num_ranks + len(ways))]
    }
    for _ in range(3 * costs.num_stages * len(ways)):
        reached: dict[Progress, list[Times]] = {}
        for progress, kept in states.items():
            for m, stage, rank, is_chain in _choices(progress, ways, costs, placement, cap):
                done, weights = progress[m]
                one = (done + 1, weights) if is_chain else (done, weights | 1 << stage)
                following = tuple(one if other == m else old for other, old in enumerate(progress))
                for times in kept:
                    start = times[rank]
                    new = list(times)
                    if is_chain:
                        moved = done and placement.ranks[ways[m]][_stage(done - 1, costs)] != rank
                        start = max(start, times[num_ranks + m] + (delay if moved else 0.0))
                        new[rank] = (
                            start + (costs.forward if done == stage else costs.input_grad)[stage]
                        )
                        new[num_ranks + m] = new[rank]
                    else:
                        new[rank] = start + costs.weight_grad[stage]
                    _keep(reached.setdefault(following, []), tuple(new))
        states = reached
    return min(max(times) for kept in states.values() for times in kept)


def _stage(operation: int, costs: StageCosts) -> int:
    return min(operation, 2 * costs.num_stages - 1 - operation)


def _choices(
    progress: Progress, ways: Sequence[int], costs: StageCosts, placement: Placement, cap: float
) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the actions that may come next.

    Micro-batch, stage, rank, and whether it is of the chain.
    """
    num_stages = costs.num_stages
    held = [0.0] * placement.num_ranks
    for (done, weights), way in zip(progress, ways, strict=True):
        for stage in range(min(done, num_stages)):
            if not weights >> stage & 1:
                is_left = done > 2 * num_stages - 1 - stage
                held[placement.ranks[way][stage]] += (
                    costs.held_for_weights if is_left else costs.activation
                )[stage]
    started: set[int] = set()
    for m, ((done, weights), way) in enumerate(zip(progress, ways, strict=True)):
        for stage in range(num_stages):
            if done > 2 * num_stages - 1 - stage and not weights >> stage & 1:
                yield m, stage, placement.ranks[way][stage], False
        if done < 2 * num_stages and not (
            done == 0 and way in started
        ):  # micro-batches of a direction are alike
            started |= {way} if done == 0 else set()
            stage = _stage(done, costs)
            rank = placement.ranks[way][stage]
            if done >= num_stages or held[rank] + costs.activation[stage] <= cap:
                yield m, stage, rank, True


def _keep(kept: list[Times], times: Times) -> None:
    """Add times to a list, unless one of it is nowhere later; drop those that are nowhere earlier."""
    if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in kept):
        return
    kept[:] = [other for other in kept if any(a < b for a, b in zip(other, times, strict=True))]
    kept.append(times)

"""How good a capped schedule can be: a bound on the time of a step that holds for every order of its actions."""

from __future__ import annotations

from collections.abc import Sequence

from gems.schedule.bounds import Saving, least_time
from gems.schedule.synthesis.problem import Problem


def span_bound(problem: Problem, allow: Sequence[str] = ()) -> float:
    """Return ticks that no step on this placement and under this cap is shorter than; infinite if none can pass.

    It holds on each rank, with heads and tails of the chain: its work, its forwards and input gradients with the way
    back to stage 0, and the memory-time of what it holds (size x shortest lifetime, over cap x time; the bound of the
    controllable-memory schedules, Qi et al. 2024). Memory actions save memory-time as in `least_time`, recomputation
    and copies without regard to each other, so the bound holds but may not be reached.
    """
    ways = [way for way in range(problem.num_directions) if problem.num_in(way)]
    reached, lifetimes = [problem.reached(way) for way in ways], [problem.lifetimes(way) for way in ways]
    last, weight_grad = 2 * problem.num_stages - 1, problem.weight_grad
    longest = float(min(ends[last] for ends in reached) + weight_grad[0])
    for rank in range(problem.num_ranks):
        work = chain = held = 0
        heads, tails = [], []
        savings: dict[str, list[Saving]] = {"recompute": [], "offload": []}
        for way, ends, lives in zip(ways, reached, lifetimes, strict=True):
            count, stages, times = problem.num_in(way), problem.stages_of(rank, way), problem.time[way]
            if stages:
                heads.append(ends[stages[0]] - times[stages[0]])
                tails.append(ends[last] - ends[last - stages[0]] + weight_grad[0])
            for stage in stages:
                chain += count * (times[stage] + times[last - stage])
                work += count * weight_grad[stage]
                freed = problem.size[stage] - problem.held[stage]  # between input and weight gradient
                held += count * (problem.size[stage] * lives[stage] - freed * weight_grad[stage])
                for name in allow:
                    saved, paid = _saving(problem, stage, lives[stage], name)
                    if saved > 0:
                        savings[name].append((count * saved, count * paid))
        if heads:
            work, head = work + chain, min(heads)
            longest = max(longest, head + chain + min(tails), head + least_time(work, held, problem.cap, **savings))
    return longest


def _saving(problem: Problem, stage: int, life: int, name: str) -> tuple[int, int]:
    """Return the memory-time that a memory action saves of one micro-batch on a stage, and the time that it takes."""
    size, times = problem.size[stage], problem.time[0]
    after = times[2 * problem.num_stages - 1 - stage] + problem.weight_grad[stage]
    if name == "recompute":
        paid, boundary = problem.recompute[stage], problem.boundary[stage]
        return (size - boundary) * (life - paid - after), paid
    paid = problem.copy[stage]
    return size * (life - times[stage] - 2 * paid - after), paid

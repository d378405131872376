"""How good a capped schedule can be at best: bounds on the time of a step that hold for every order of its actions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from gems.schedule.synthesis.problem import Problem


def span_bound(problem: Problem, allow: Sequence[str] = ()) -> float:
    """Return ticks that no step on this placement and under this cap is shorter than; infinite where none can pass.

    Held on each rank, with heads and tails of the chain: its work, its forwards and input gradients with the way back
    to stage 0, and the memory-time of what it holds (size x shortest lifetime, over cap x time; the bound of the
    controllable-memory schedules, Qi et al. 2024). With memory actions a rank may buy memory-time: recomputation for
    time of the rank, copies for time of its copy engines. Each is taken at its best rate, in fractions of a micro-batch
    and without regard to the other, so the bound holds but may not be reached.
    """
    directions = [way for way in range(problem.num_directions) if problem.num_in(way)]
    reached = [problem.reached(way) for way in directions]
    lifetimes = [problem.lifetimes(way) for way in directions]
    latency = min(ends[-1] for ends in reached) + problem.weight_grad[0]
    return max(latency, *(_rank_bound(problem, rank, allow, reached, lifetimes) for rank in range(problem.num_ranks)))


def _rank_bound(
    problem: Problem,
    rank: int,
    allow: Sequence[str],
    reached: Sequence[Sequence[int]],
    lifetimes: Sequence[Sequence[int]],
) -> float:
    last = 2 * problem.num_stages - 1
    work = chain = 0
    heads, tails = [], []
    stages: list[tuple[int, int, int]] = []
    for direction, (ends, lives) in enumerate(zip(reached, lifetimes, strict=True)):
        count, held, times = (
            problem.num_in(direction), problem.stages_of(rank, direction), problem.time[direction]
        )  # fmt: skip
        if not held:
            continue
        heads.append(ends[held[0]] - times[held[0]])
        tails.append(ends[last] - ends[last - held[0]] + problem.weight_grad[0])
        for stage in held:
            chain += count * (times[stage] + times[last - stage])
            work += count * problem.weight_grad[stage]
            stages.append((stage, count, lives[stage]))
    if not stages:
        return 0.0
    work += chain
    head = min(heads)
    return max(head + work, head + chain + min(tails), head + _memory_bound(problem, stages, work, allow))


def _memory_bound(problem: Problem, stages: Sequence[tuple[int, int, int]], work: int, allow: Sequence[str]) -> float:
    """Return the time that the memory of a rank must be there for what it holds, less what memory actions save."""
    kept = sum(count * _memory_time(problem, stage, life) for stage, count, life in stages)
    if not allow:
        return kept / problem.cap if problem.cap else float("inf")
    recomputed = _savings(problem, stages, "recompute") if "recompute" in allow else []
    offloaded = _savings(problem, stages, "offload") if "offload" in allow else []
    low, high = float(work), max(float(work), kept / max(1, problem.cap))
    for _ in range(60):
        middle = (low + high) / 2
        saved = _most_saved(recomputed, middle - work) + _most_saved(offloaded, middle)
        if kept - saved <= problem.cap * middle:
            high = middle
        else:
            low = middle
    return low


def _memory_time(problem: Problem, stage: int, life: int) -> int:
    return problem.size[stage] * life - _let_go_early(problem, stage)


def _let_go_early(problem: Problem, stage: int) -> int:
    """Return the memory-time that is let go between input and weight gradient, where the latter follows at once."""
    return (problem.size[stage] - problem.held[stage]) * problem.weight_grad[stage]


def _savings(problem: Problem, stages: Sequence[tuple[int, int, int]], way: str) -> list[tuple[int, int]]:
    """Return (memory-time saved, time paid) of each stage's micro-batches, where one is saved at all."""
    found = []
    last = 2 * problem.num_stages - 1
    for stage, count, life in stages:
        size, time = problem.size[stage], problem.time[0]
        after = time[last - stage] + problem.weight_grad[stage]
        if way == "recompute":
            paid = problem.recompute[stage]
            held = (size - problem.boundary[stage]) * (paid + after) + problem.boundary[stage] * life
        else:
            paid = problem.copy[stage]
            held = size * (time[stage] + paid + paid + after)
        held -= _let_go_early(problem, stage)
        saved = _memory_time(problem, stage, life) - held
        if saved > 0:
            found.append((count * saved, count * paid))
    return sorted(found, key=lambda pair: Fraction(-pair[0], pair[1]) if pair[1] else Fraction(-pair[0] << 60))


def _most_saved(savings: Sequence[tuple[int, int]], time: float) -> float:
    """Return the most memory-time that can be bought for `time` (a fractional knapsack)."""
    saved = 0.0
    for gain, paid in savings:
        if paid >= time:
            return saved + (gain * time / paid if paid else gain)
        saved += gain
        time -= paid
    return saved

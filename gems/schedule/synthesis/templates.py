"""Templates to start from: for one placement, the patterns with the shortest periods that were found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil

from gems.schedule.synthesis.budget import Budget
from gems.schedule.synthesis.memory_actions import Act, least_room
from gems.schedule.synthesis.pattern import Template, pattern
from gems.schedule.synthesis.problem import Problem

KEEP_EIGHTHS = (0, 1, 2, 3, 4, 6)


def acts_to_try(problem: Problem, allow: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the assignments of acts to stages worth a pattern: early stages, whose activations wait longest, first.

    The last stage's activations are used at once and always stay.
    """
    num_stages = problem.num_stages
    ways = [(0,) * num_stages] if least_room(problem, (0,) * num_stages) <= problem.cap else []
    acts = {"recompute": Act.RECOMPUTE, "offload": Act.OFFLOAD}
    for name in allow:
        for eighths in KEEP_EIGHTHS:
            first_kept = num_stages - 1 - num_stages * eighths // 8
            way = tuple(int(acts[name]) if stage < first_kept else 0 for stage in range(num_stages))
            if way not in ways and least_room(problem, way) <= problem.cap:
                ways.append(way)
    if len(allow) > 1:
        for offloaded, acted in product((2, 4, 6), (4, 5, 6, 7)):
            first, second = num_stages * offloaded // 8, num_stages * acted // 8
            way = tuple(
                int(Act.OFFLOAD if stage < first else Act.RECOMPUTE if stage < second else Act.KEEP)
                for stage in range(num_stages)
            )
            if first < second and way not in ways and least_room(problem, way) <= problem.cap:
                ways.append(way)
    return ways


def least_period(problem: Problem, acts: Sequence[int], group: int) -> int:
    """Return the grains that `group` micro-batches need of the busiest rank, and of its room where nothing acts."""
    load, room = [0] * problem.num_ranks, [0] * problem.num_ranks
    for g in range(group):
        direction = g % problem.num_directions
        lifetimes, times = problem.lifetimes(direction), problem.time_grains[direction]
        for stage in range(problem.num_stages):
            rank = problem.rank[direction][stage]
            load[rank] += times[stage] + times[2 * problem.num_stages - 1 - stage]
            load[rank] += problem.weight_grains[stage]
            if acts[stage] == Act.RECOMPUTE:
                load[rank] += problem.recompute_grains[stage]
            if acts[stage] == Act.KEEP:
                room[rank] += problem.size[stage] * lifetimes[stage]
    return max(1, *load, ceil(max(room) / (problem.cap * problem.grain) - 1e-6))


def free_running(problem: Problem, acts: Sequence[int]) -> Template:
    """Return the template of the plain greedy: chains without a wait, at the least period, whatever collides."""
    num_stages, grain = problem.num_stages, problem.grain
    group = problem.num_directions
    period = least_period(problem, acts, group)
    rows = []
    for direction in range(group):
        phase = direction * period // group
        ends = [end // grain for end in problem.reached(direction)]
        starts = [end - time // grain for end, time in zip(ends, problem.time[direction], strict=True)]
        rows.append(tuple(phase + start for start in (*starts, *ends[: num_stages - 1 : -1])))
    return Template(period, tuple(rows), 0)


def groups_of(problem: Problem) -> tuple[int, ...]:
    """Return the numbers of micro-batches a period to try."""
    return (2, 4) if problem.num_directions == 2 else (1, 2)


def patterns(
    problem: Problem, acts: Sequence[int], group: int, budget: Budget, longest: float = float("inf")
) -> Iterator[Template]:
    """Yield the template of the shortest period that keeps the cap, and before it a shorter one that overflows little.

    Tries periods from the lower bound up to `longest`, and for each the phases of the micro-batches against one
    another.
    """
    steps = 2 * group * problem.num_stages
    period = least_period(problem, acts, group)
    tightest: Template | None = None
    longest = min(longest, 4 * period + 64)
    while period <= longest:
        best: Template | None = None
        for phases in _phases(problem, period, group):
            if not budget.spend(steps):
                break
            found = pattern(problem, acts, period, phases)
            if found is not None and (best is None or found.overflow < best.overflow):
                best = found
                if not found.overflow:
                    break
        if best is not None:
            if not best.overflow:
                if tightest is not None:
                    yield tightest
                yield best
                return
            if tightest is None:
                tightest = best
        if budget.spent + steps > budget.steps:
            break
        period += max(1, period // 80)
    if tightest is not None:
        yield tightest


def _phases(problem: Problem, period: int, group: int) -> Iterator[tuple[int, ...]]:
    """Yield the phases of a period's micro-batches, the evenly spread ones where there are too many."""
    if group == 1:
        yield (0,)
    elif group == 2:
        step = max(1, period // 160)
        yield from ((0, phase) for phase in range(0, period, step))
    else:
        half = period // 2
        step = max(1, half // 40)
        yield from ((0, phase, half, phase + half) for phase in range(0, half, step))

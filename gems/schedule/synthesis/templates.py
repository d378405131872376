"""Templates to start from: the patterns with the shortest periods found, and their annealing.

The search is limited by an amount of work instead of the clock, so that it gives the same result on
any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import ceil, exp
from random import Random

from gems.schedule.synthesis.pattern import Template, pattern
from gems.schedule.synthesis.problem import Act, Problem, least_room

WHOLE = (2, 3)  # micro-batches
KEEP_EIGHTHS = (0, 1, 2, 3, 4, 6)
ROUNDS = 1500
LATENCY_ROUNDS = 300
LATENCY_WEIGHT = 0.02
COLD = 0.002
SHARE = 0.5
# the speed of one core of a common server in pure Python, so that seconds are roughly kept
STEPS_PER_S = 300_000


class Budget:
    """The steps that a search may take; one step is one operation placed by the list scheduler."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.spent = 0

    @property
    def left(self) -> int:
        """The steps that have not been taken."""
        return self.steps - self.spent

    def spend(self, steps: int) -> bool:
        """Take steps if enough are left, and return whether they were taken."""
        is_left = steps <= self.left
        self.spent += steps * is_left
        return is_left

    @contextmanager
    def share(self, part: float) -> Iterator[Budget]:
        """Yield a budget with a part of the remaining steps, whose spent steps count here, too."""
        share = Budget(int(self.left * part))
        yield share
        self.spent += share.spent


def in_whole_micro_batches(problem: Problem) -> Problem | None:
    """Return a problem with the cap lowered to two or three whole micro-batches.

    Return None if the cap is not between such numbers on the heaviest rank. A rank that starts the
    first stages of one more micro-batch than it can hold blocks the room for those that could end.
    So a list found under the lower cap, which also keeps the higher one, may be much faster. With
    one micro-batch, too much of the cap would be lost; with more than three, the lost part is
    small.
    """
    stages_held = [
        problem.rank_stages(rank, direction)
        for rank in range(problem.num_ranks)
        for direction in range(problem.num_directions)
    ]
    heaviest = max(1, *(sum(problem.size[stage] for stage in stages) for stages in stages_held))
    whole = problem.cap // heaviest
    is_between = whole in WHOLE and problem.cap - whole * heaviest > heaviest // 1000
    return replace(problem, cap=whole * heaviest) if is_between else None


def acts_to_try(problem: Problem, allow: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the assignments of acts to stages that are worth a pattern.

    Early stages, whose activations wait longest, come first. The activations of the last stage are
    used at once and always stay.
    """
    num_stages = problem.num_stages
    tried = [(0,) * num_stages]
    for name in allow:
        firsts = (num_stages - 1 - num_stages * eighths // 8 for eighths in KEEP_EIGHTHS)
        tried += [
            (int(Act[name.upper()]),) * first + (0,) * (num_stages - first) for first in firsts
        ]
    if len(allow) > 1:
        for offloaded, acted in product((2, 4, 6), (4, 5, 6, 7)):
            first = num_stages * offloaded // 8
            second = num_stages * acted // 8
            if first < second:
                acts = (int(Act.OFFLOAD),) * first + (int(Act.RECOMPUTE),) * (second - first)
                tried.append(acts + (0,) * (num_stages - second))
    return [acts for acts in dict.fromkeys(tried) if least_room(problem, acts) <= problem.cap]


def least_period(problem: Problem, acts: Sequence[int], group: int) -> int:
    """Return the grains that `group` micro-batches need on the busiest rank.

    They also include the need of its room if there are no memory actions.
    """
    load = [0] * problem.num_ranks
    room = [0] * problem.num_ranks
    for g in range(group):
        direction = g % problem.num_directions
        lifetimes = problem.lifetimes(direction)
        times = problem.time_grains
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
    """Return the template of the plain greedy method.

    It has chains without waits, at the least period, regardless of collisions.
    """
    num_stages = problem.num_stages
    grain = problem.grain
    group = problem.num_directions
    period = least_period(problem, acts, group)
    rows = []
    for direction in range(group):
        phase = direction * period // group
        ends = [end // grain for end in problem.reached(direction)]
        starts = [end - time // grain for end, time in zip(ends, problem.time, strict=True)]
        rows.append(tuple(phase + start for start in (*starts, *ends[: num_stages - 1 : -1])))
    return Template(period, tuple(rows), 0)


def patterns(
    problem: Problem, acts: Sequence[int], group: int, budget: Budget, longest: float = float("inf")
) -> Iterator[Template]:
    """Yield the template with the shortest period that keeps the cap.

    Before it, yield a shorter template with little overflow, if any. Periods are tried from the
    lower bound up to `longest`, and for each period the relative phases of the micro-batches.
    """
    steps = 2 * group * problem.num_stages
    period = least_period(problem, acts, group)
    longest = min(longest, 4 * period + 64)
    tightest = best = None
    while period <= longest:
        best = None
        for phases in _phases(period, group):
            if not budget.spend(steps):
                break
            template = pattern(problem, acts, period, phases)
            if template is not None and (best is None or template.overflow < best.overflow):
                best = template
                if not template.overflow:
                    break
        if best is not None and not best.overflow:
            break
        tightest = tightest or best
        if budget.left < steps:
            break
        period += max(1, period // 80)
    if tightest is not None:
        yield tightest
    if best is not None and not best.overflow:
        yield best


def _phases(period: int, group: int) -> Iterator[tuple[int, ...]]:
    """Yield the phases of a period's micro-batches; if there are too many, evenly spread ones."""
    if group == 1:
        yield (0,)
    elif group == 2:
        step = max(1, period // 160)
        yield from ((0, phase) for phase in range(0, period, step))
    else:
        half = period // 2
        step = max(1, half // 40)
        yield from ((0, phase, half, phase + half) for phase in range(0, half, step))


def anneal(
    problem: Problem, acts: Sequence[int], template: Template, budget: Budget, random: Random
) -> Template | None:
    """Return a template with a shorter period than `template`, or None if none is found in time.

    This is modulo scheduling by simulated annealing. It varies the stalls before operations and the
    phases of micro-batches. The cost is the size above the cap plus a small part of the latency,
    which is reduced further once the cap is kept.
    """
    group = template.num_micro_batches
    steps = 2 * template.num_micro_batches * problem.num_stages
    floor = least_period(problem, acts, group)
    period = max(floor, template.period - max(1, template.period // 40))
    best: Template | None = None
    with budget.share(SHARE) as own:
        while period < (best or template).period:
            better = _at_period(problem, acts, group, period, own, random, steps)
            if better is None:
                break
            best = better
            period = max(floor, period - max(1, period // 40))
    return best


def _at_period(
    problem: Problem,
    acts: Sequence[int],
    group: int,
    period: int,
    budget: Budget,
    random: Random,
    steps: int,
) -> Template | None:
    num_operations = 3 * problem.num_stages
    stalls = [[0] * num_operations for _ in range(group)]
    phases = [g * period // group for g in range(group)]
    longest = max(max(problem.time_grains), 2)
    delays = (1, 1, 2, longest // 2, longest)
    current = best_cost = float("inf")
    best_template: Template | None = None
    rounds_left = ROUNDS
    for turn in range(ROUNDS + LATENCY_ROUNDS):
        if not rounds_left or not budget.spend(steps):
            break
        rounds_left -= 1
        g = random.randrange(group)
        operation = random.randrange(num_operations)
        was = stalls[g][operation]
        phase = phases[g]
        if turn and group > 1 and random.random() < 0.2:
            phases[g] = random.randrange(period) if g else 0
        elif turn:
            stalls[g][operation] = 0 if was and random.random() < 0.6 else random.choice(delays)
        variant = pattern(problem, acts, period, phases, stalls)
        cost = float("inf")
        # size above the cap, in the largest stage's activations, plus a small part of the latency
        if variant is not None:
            latency = (
                sum(row[2 * problem.num_stages - 1] - row[0] for row in variant.starts) / period
            )
            cost = variant.overflow / max(problem.size) + LATENCY_WEIGHT * latency
        if variant is not None and not variant.overflow and cost < best_cost:
            rounds_left = LATENCY_ROUNDS if best_template is None else rounds_left
            best_template = variant
            best_cost = cost
        heat = (1.0 - turn / (ROUNDS + LATENCY_ROUNDS)) if best_template is None else COLD
        if cost <= current or (
            cost < float("inf") and random.random() < exp((current - cost) / heat)
        ):
            current = cost
        else:
            stalls[g][operation], phases[g] = was, phase
    return best_template

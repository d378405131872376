"""Annealing of a pattern: stalls and phases are varied at random until a shorter period keeps the cap."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random

from gems.schedule.synthesis.budget import Budget
from gems.schedule.synthesis.pattern import Template, pattern
from gems.schedule.synthesis.problem import Problem
from gems.schedule.synthesis.templates import least_period

ROUNDS, LATENCY_ROUNDS = 1500, 300
LATENCY_WEIGHT, COLD = 0.02, 0.002
SHARE = 0.5


def anneal(
    problem: Problem, acts: Sequence[int], template: Template, budget: Budget, random: Random
) -> Template | None:
    """Return a template of a shorter period than that of `template`, None where none is found within the budget.

    Modulo scheduling by simulated annealing: what is varied are the stalls before operations and the phases of
    micro-batches, what is paid is the size above the cap and a little the latency, which is brought down
    further once the cap is kept.
    """
    group, steps = template.num_micro_batches, 2 * template.num_micro_batches * problem.num_stages
    floor = least_period(problem, acts, group)
    period = max(floor, template.period - max(1, template.period // 40))
    found: Template | None = None
    own = budget.share(SHARE)
    while period < (found or template).period:
        better = _at_period(problem, acts, group, period, own, random, steps)
        if better is None:
            break
        found = better
        period = max(floor, period - max(1, period // 40))
    budget.settle(own)
    return found


def _at_period(
    problem: Problem, acts: Sequence[int], group: int, period: int, budget: Budget, random: Random, steps: int
) -> Template | None:
    num_operations = 3 * problem.num_stages
    stalls = [[0] * num_operations for _ in range(group)]
    phases = [g * period // group for g in range(group)]
    longest = max(max(problem.time_grains[0]), 2)
    delays = (1, 1, 2, longest // 2, longest)
    current = best = float("inf")
    found: Template | None = None
    left = ROUNDS
    for turn in range(ROUNDS + LATENCY_ROUNDS):
        if not left or not budget.spend(steps):
            break
        left -= 1
        g, operation = random.randrange(group), random.randrange(num_operations)
        was, phase = stalls[g][operation], phases[g]
        if turn and group > 1 and random.random() < 0.2:
            phases[g] = random.randrange(period) if g else 0
        elif turn:
            stalls[g][operation] = 0 if was and random.random() < 0.6 else random.choice(delays)
        made = pattern(problem, acts, period, phases, stalls)
        cost = float("inf") if made is None else _cost(problem, made)
        if made is not None and not made.overflow and cost < best:
            left = LATENCY_ROUNDS if found is None else left
            found, best = made, cost
        heat = (1.0 - turn / (ROUNDS + LATENCY_ROUNDS)) if found is None else COLD
        if cost <= current or (cost < float("inf") and random.random() < exp((current - cost) / heat)):
            current = cost
        else:
            stalls[g][operation], phases[g] = was, phase
    return found


def _cost(problem: Problem, template: Template) -> float:
    """Return the sizes above the cap, in the largest stages' activations, and with little weight the latency."""
    last = 2 * problem.num_stages - 1
    latency = sum(row[last] - row[0] for row in template.starts) / template.period
    return template.overflow / max(problem.size) + LATENCY_WEIGHT * latency

"""The exact pattern: CP-SAT (extra `solver`, OR-tools) searches for a shorter period."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from gems.schedule.synthesis.pattern import Template
from gems.schedule.synthesis.problem import Problem
from gems.schedule.synthesis.templates import Budget, least_period

IS_INSTALLED = find_spec("ortools") is not None
MAX_OPERATIONS = 200
STEPS_A_PERIOD = 150_000
# in the solver's own deterministic time, which is about the same in seconds
DETERMINISTIC_TIME = 0.15
SIZE_DIGITS = 10**6


def is_small(problem: Problem, acts: Sequence[int], template: Template) -> bool:
    """Return whether the solver is installed and suits the pattern.

    The pattern must be small and without memory actions.
    """
    size = 3 * problem.num_stages * template.num_micro_batches
    return IS_INSTALLED and not any(acts) and size <= MAX_OPERATIONS


def solve(problem: Problem, template: Template, budget: Budget, seed: int) -> Template | None:
    """Return a template with a shorter period than `template`, or None if none is found in time.

    One worker and the solver's own deterministic time make the result the same on any machine.
    """
    group = template.num_micro_batches
    found = None
    floor = least_period(problem, (0,) * problem.num_stages, group)
    period = template.period
    while (period := period - max(1, period // 40)) >= floor and budget.spend(STEPS_A_PERIOD):
        better = _at_period(problem, group, period, seed)
        if better is None:
            break
        found = better
    return found


def _at_period(problem: Problem, group: int, period: int, seed: int) -> Template | None:
    """Return the pattern of a period, or None if there is none or none is found in time.

    An operation starts at slot + period x turn. At a slot, a rank holds what has begun by then and
    not ended: the sum over its activations of the turns between begin and end, plus one if the slot
    is within the rest.
    """
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    num_stages = problem.num_stages
    last = 2 * num_stages - 1
    slots: dict[tuple[int, int], Any] = {}
    turns: dict[tuple[int, int], Any] = {}
    starts: dict[tuple[int, int], Any] = {}
    busy: list[list[Any]] = [[] for _ in range(problem.num_ranks)]
    length = [
        (*problem.time_grains[g % problem.num_directions], *problem.weight_grains)
        for g in range(group)
    ]
    shortest = sum(problem.time_grains[0]) + sum(problem.lag_grains[0])
    horizon = 3 * (shortest + period) // period + 2
    for g in range(group):
        direction = g % problem.num_directions
        ranks = (*problem.rank[direction], *problem.placement.ranks[direction])
        for operation, ticks in enumerate(length[g]):
            if ticks > period:
                return None
            slot = model.new_int_var(0, period - 1, "")
            turn = model.new_int_var(0, horizon, "")
            slots[g, operation], turns[g, operation] = slot, turn
            starts[g, operation] = slot + period * turn
            busy[ranks[operation]].append(model.new_fixed_size_interval_var(slot, ticks, ""))
            # an operation that extends past the end of the period also fills its beginning
            busy[ranks[operation]].append(
                model.new_fixed_size_interval_var(slot - period, ticks, "")
            )
        for c in range(last):
            lag = problem.lag_grains[direction][c + 1]
            model.add(starts[g, c + 1] >= starts[g, c] + length[g][c] + lag)
        for stage in range(num_stages):
            end = starts[g, last - stage] + length[g][last - stage]
            model.add(starts[g, 2 * num_stages + stage] >= end)
    model.add(turns[0, 0] == 0)
    for row in busy:
        model.add_no_overlap(row)
    unit = max(1, max(problem.size) // SIZE_DIGITS)
    for rank in range(problem.num_ranks):
        lives = [
            (g, stage)
            for g in range(group)
            for stage in problem.stages_of(rank, g % problem.num_directions)
        ]
        # the held size only grows at forwards, so the cap needs to hold only when each of them
        # begins
        for at in lives:
            moment = slots[at]
            held = []
            for g, stage in lives:
                weight = 2 * num_stages + stage
                size = -(-problem.size[stage] // unit)
                begun, ended, wraps = (model.new_bool_var("") for _ in range(3))
                begin = slots[g, stage]
                end = slots[g, weight] + length[g][weight]
                model.add(begin <= moment).only_enforce_if(begun)
                model.add(begin > moment).only_enforce_if(~begun)
                # one-sided, because the solver prefers to hold less: an end counts only if it is
                # not after the moment
                model.add(end <= moment).only_enforce_if(ended)
                model.add(end <= moment + period).only_enforce_if(~wraps)
                held.append(size * (turns[g, weight] - turns[g, stage] + begun - ended + wraps))
            model.add(sum(held) <= problem.cap // unit)
    model.minimize(sum(starts[g, last] for g in range(group)))
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = DETERMINISTIC_TIME
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    rows = tuple(
        tuple(int(solver.value(starts[g, operation])) for operation in range(3 * num_stages))
        for g in range(group)
    )
    return Template(period, rows, 0)

"""The exact pattern: CP-SAT (extra `solver`, OR-tools) searches for a shorter period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
Cell = tuple[int, int]  # micro-batch of a period, and operation


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
    best = None
    floor = least_period(problem, (0,) * problem.num_stages, group)
    period = template.period
    while (period := period - max(1, period // 40)) >= floor and budget.spend(STEPS_A_PERIOD):
        better = _at_period(problem, group, period, seed)
        if better is None:
            break
        best = better
    return best


def _at_period(problem: Problem, group: int, period: int, seed: int) -> Template | None:
    """Return the pattern of a period, or None if there is none or none is found in time.

    An operation starts at slot + period x turn. At a slot, a rank holds what has begun by then and
    not ended: the sum over its activations of the turns between begin and end, plus one if the slot
    is within the rest.
    """
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    length = [(*problem.time_grains, *problem.weight_grains) for g in range(group)]
    if max(map(max, length)) > period:
        return None
    cells = [(g, operation) for g in range(group) for operation in range(3 * problem.num_stages)]
    shortest = sum(problem.time_grains) + sum(problem.lag_grains[0])
    horizon = 3 * (shortest + period) // period + 2
    slots: dict[Cell, Any] = {}
    turns: dict[Cell, Any] = {}
    for cell in cells:
        slots[cell] = model.new_int_var(0, period - 1, "")
        turns[cell] = model.new_int_var(0, horizon, "")
    starts = {cell: slots[cell] + period * turns[cell] for cell in cells}
    busy = _add_order(model, problem, slots, starts, length, period)
    model.add(turns[0, 0] == 0)
    for row in busy:
        model.add_no_overlap(row)
    _add_cap(model, problem, slots, turns, length, period)
    last = 2 * problem.num_stages - 1
    model.minimize(sum(starts[g, last] for g in range(group)))
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = DETERMINISTIC_TIME
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    rows = tuple(
        tuple(
            int(solver.value(starts[g, operation])) for operation in range(3 * problem.num_stages)
        )
        for g in range(group)
    )
    return Template(period, rows, 0)


def _add_order(
    model: Any,
    problem: Problem,
    slots: Mapping[Cell, Any],
    starts: Mapping[Cell, Any],
    length: Sequence[Sequence[int]],
    period: int,
) -> list[list[Any]]:
    """Require operations to follow their data; return the intervals in which ranks are busy."""
    last = 2 * problem.num_stages - 1
    busy: list[list[Any]] = [[] for _ in range(problem.num_ranks)]
    for g, ticks in enumerate(length):
        direction = g % problem.num_directions
        ranks = (*problem.rank[direction], *problem.placement.ranks[direction])
        for operation, rank in enumerate(ranks):
            slot = slots[g, operation]
            # an operation that extends past the end of the period also fills its beginning
            busy[rank] += [
                model.new_fixed_size_interval_var(begin, ticks[operation], "")
                for begin in (slot, slot - period)
            ]
        for c in range(last):
            lag = problem.lag_grains[direction][c + 1]
            model.add(starts[g, c + 1] >= starts[g, c] + ticks[c] + lag)
        for stage in range(problem.num_stages):
            end = starts[g, last - stage] + ticks[last - stage]
            model.add(starts[g, 2 * problem.num_stages + stage] >= end)
    return busy


def _add_cap(
    model: Any,
    problem: Problem,
    slots: Mapping[Cell, Any],
    turns: Mapping[Cell, Any],
    length: Sequence[Sequence[int]],
    period: int,
) -> None:
    """Add the cap at the beginning of each forward, since the held size grows only there."""
    unit = max(1, max(problem.size) // SIZE_DIGITS)
    for rank in range(problem.num_ranks):
        lives = [
            (g, stage)
            for g in range(len(length))
            for stage in problem.rank_stages(rank, g % problem.num_directions)
        ]
        for at in lives:
            moment = slots[at]
            terms = []
            for g, stage in lives:
                weight = 2 * problem.num_stages + stage
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
                terms.append(size * (turns[g, weight] - turns[g, stage] + begun - ended + wraps))
            model.add(sum(terms) <= problem.cap // unit)

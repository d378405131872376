"""The exact method: the partition of least cost with its proof, by a solver for the placement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from gems.partition.even import even
from gems.partition.problem import InfeasibleError, Partition, Problem, Solution
from gems.partition.solvers.chain import partition_chain
from gems.partition.solvers.paired import partition_pairs
from gems.partition.solvers.several import partition_several
from gems.partition.solvers.tables import kept

METHOD = "exact"


def solve(problem: Problem, budget_s: float = 10.0) -> Partition:
    """Return the partition of least cost and, among those, with the fewest crossing bytes.

    Chains are always solved to the end. For pairs and other placements, the result is the best
    partition found in `budget_s` seconds; `bound`, `gap` and `is_optimal` tell its distance from
    the least cost. Tables are built once, regardless of the time. In `facts`, `solver` is chain,
    pairs or several, and `has_fewest_bytes` tells whether ties are certainly resolved.

    Raises:
        InfeasibleError: No partition keeps the limits; for pairs and other placements, also if none
            was found in time.
        ValueError: There are more stages than layers.
    """
    begin = time.perf_counter()
    if not 1 <= problem.num_stages <= problem.num_layers:
        raise ValueError(f"{problem.num_layers} layers make no {problem.num_stages} stages")
    problem = kept(problem)
    deadline = begin + budget_s
    start = None
    limits_only = replace(problem, ranks=problem.limits, limits=(), limit=float("inf"))
    if problem.limits and _solver(problem) in ("pairs", "several"):
        now = time.perf_counter()
        fit = _solve(limits_only, now + (deadline - now) / 2, enough=problem.limit)
        if fit.boundaries is None or fit.cost > problem.limit:
            raise InfeasibleError(fit.cost, problem.limit, fit.bound)
        start = fit.boundaries
    answer = _solve(problem, deadline, start)
    if answer.boundaries is None:
        fit = _solve(limits_only, deadline)
        raise InfeasibleError(fit.cost, problem.limit, fit.bound)
    facts = {"solver": _solver(problem), "has_fewest_bytes": answer.has_fewest_bytes}
    solve_s = time.perf_counter() - begin
    return Partition(
        METHOD, answer.boundaries, answer.cost, answer.bound, answer.is_proven, solve_s, facts
    )


def _solver(problem: Problem) -> str:
    if problem.num_stages in (1, problem.num_layers):
        return "only cut"
    if problem.is_chain:
        return "chain"
    return "pairs" if problem.is_paired else "several"


def _solve(
    problem: Problem,
    deadline: float,
    start: Sequence[int] | None = None,
    enough: float = float("-inf"),
) -> Solution:
    match _solver(problem):
        case "pairs":
            return partition_pairs(problem, deadline, start, enough)
        case "several":
            return partition_several(problem, deadline, start, enough)
        case "chain":
            boundaries = partition_chain(problem)
        case _:
            boundaries = even(problem.num_layers, problem.num_stages)
    cost = float("inf") if boundaries is None else problem.cost(boundaries)
    return Solution(boundaries if cost < float("inf") else None, cost, cost, True, True)

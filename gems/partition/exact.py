"""The exact method: the partition of least cost with its proof, by the solver that suits the placement."""

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
    """Return the partition of the least cost and, among those, of the fewest bytes that cross.

    Chains are always solved to the end. Of pairs and other placements the answer is the best partition found in
    `budget_s` seconds; `bound`, `gap` and `is_optimal` say how far from the least it may be. Tables are built once,
    whatever time that takes. facts: `solver` is chain, pairs or several; `has_fewest_bytes` says whether ties are
    settled for sure.

    Raises:
        InfeasibleError: no partition keeps the limits; of pairs and other placements also when none was found in the
        time. ValueError: more stages than layers.
    """
    begin = time.perf_counter()
    if not 1 <= problem.num_stages <= problem.num_layers:
        raise ValueError(f"{problem.num_layers} layers make no {problem.num_stages} stages")
    problem = kept(problem)
    deadline = begin + budget_s
    if problem.num_stages in (1, problem.num_layers):
        solver, answer = "only cut", _only(problem)
    elif problem.is_chain:
        solver, answer = "chain", _chain(problem)
    else:
        solver = "pairs" if problem.is_paired else "several"
        start = _within_limits(problem, deadline) if problem.limits else None
        answer = _search(problem, deadline, start)
    if answer.boundaries is None:
        raise _infeasible(problem, deadline)
    return Partition(
        METHOD, answer.boundaries, answer.cost, answer.bound, answer.is_proven, time.perf_counter() - begin,
        {"solver": solver, "has_fewest_bytes": answer.has_fewest_bytes},
    )  # fmt: skip


def _search(
    problem: Problem, deadline: float, start: Sequence[int] | None = None, enough: float = float("-inf")
) -> Solution:
    if problem.is_paired:
        return partition_pairs(problem, deadline, start, enough)
    return partition_several(problem, deadline, start, enough)


def _only(problem: Problem) -> Solution:
    boundaries = even(problem.num_layers, problem.num_stages)
    cost = problem.cost(boundaries)
    return Solution(boundaries if cost < float("inf") else None, cost, cost, True, True)


def _chain(problem: Problem) -> Solution:
    boundaries = partition_chain(problem)
    cost = float("inf") if boundaries is None else problem.cost(boundaries)
    return Solution(boundaries, cost, cost, True, True)


def _limits_only(problem: Problem) -> Problem:
    return replace(problem, ranks=problem.limits, limits=(), limit=float("inf"))


def _within_limits(problem: Problem, deadline: float) -> tuple[int, ...]:
    """Return a partition that keeps the limits, in half the time that is left."""
    now = time.perf_counter()
    answer = _search(_limits_only(problem), now + (deadline - now) / 2, enough=problem.limit)
    if answer.boundaries is None or answer.cost > problem.limit:
        raise InfeasibleError(answer.cost, problem.limit, answer.bound)
    return answer.boundaries


def _infeasible(problem: Problem, deadline: float) -> InfeasibleError:
    alone = _limits_only(problem)
    if problem.num_stages in (1, problem.num_layers):
        answer = _only(alone)
    else:
        answer = _chain(alone) if alone.is_chain else _search(alone, deadline)
    return InfeasibleError(answer.cost, problem.limit, answer.bound)

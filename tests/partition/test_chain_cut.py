"""Chains: what is no run of layers is not read, and limits that allow no cut are told."""

from __future__ import annotations

import numpy as np

from gems.partition.problem import Problem
from gems.partition.solvers.chain import Chain, least_cost, partition_chain
from tests.helpers.problems import least, memory_problem, random_problem


def test_what_is_not_a_run_of_layers_is_not_read() -> None:
    problem = random_problem("chain", 3)
    cost = least(problem)
    for rank in problem.ranks:
        for (table,) in rank.moments:
            made = table()
            made[np.tri(*made.shape, dtype=bool)] = -1e9
    boundaries = partition_chain(problem)
    assert boundaries is not None
    assert (problem.cost(boundaries), problem.crossing_bytes(boundaries)) == cost


def test_no_cut() -> None:
    problem = memory_problem("chain", 4, 10)
    limited = Problem(10, 4, problem.ranks, problem.boundary_bytes, problem.ranks, 1.0)
    assert partition_chain(limited) is None
    assert least_cost(Chain(limited)) == float("inf")

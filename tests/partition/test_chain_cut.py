"""Chains: filling and the dynamic program give the same, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from gems.partition.problem import Problem
from gems.partition.solvers import chain
from gems.partition.solvers.chain import Chain, least_cost, partition_chain
from tests.helpers.problems import least, memory_problem, random_problem


def filled_and_not(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Cost and crossing bytes by filling, and by the dynamic program alone."""
    found = []
    for small in (0, 10**6):
        monkeypatch.setattr(chain, "SMALL", small)
        boundaries = partition_chain(problem)
        assert boundaries is not None
        found.append((problem.cost(boundaries), problem.crossing_bytes(boundaries)))
    return found


class TestMonotone:
    @pytest.mark.parametrize(
        ("num_layers", "num_stages"), [(200, 16), (200, 64), (60, 59), (40, 20), (3, 2)]
    )
    def test_filling_is_as_good(
        self, num_layers: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for seed in range(4):
            problem = memory_problem("chain", num_stages, num_layers, seed, 0.99, inputs=False)
            assert Chain(problem).is_monotone()
            filled, planned = filled_and_not(problem, monkeypatch)
            assert filled == planned
            assert planned[0] == least_cost(Chain(problem))

    def test_filling_does_the_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(chain: Chain) -> float:
            raise AssertionError("the dynamic program over all cuts was run")

        problem = memory_problem("chain", 8, 200, inputs=False)
        monkeypatch.setattr(chain, "least_cost", refuse)
        assert partition_chain(problem) is not None

    def test_a_stage_that_filling_leaves_empty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of whole stages none may be skipped.

        Where filling skips a dear one, the dynamic program decides.
        """
        rng = np.random.default_rng(0)
        differed = 0
        for _ in range(60):
            num_layers = 7
            num_stages = int(rng.integers(2, 7))
            tables = []
            for _ in range(num_stages):
                total = np.concatenate(
                    ([0.0], np.cumsum(rng.integers(1, 9, size=num_layers)))
                ) * rng.integers(1, 9)
                tables.append(total[None, :] - total[:-1, None])
            problem = chain_of(tables)
            monkeypatch.setattr(chain, "SMALL", 0)
            boundaries = partition_chain(problem)
            assert boundaries is not None
            assert (problem.cost(boundaries), problem.crossing_bytes(boundaries)) == least(problem)
            filled = chain._least_filled(Chain(problem))
            assert filled is not None
            assert filled <= problem.cost(boundaries)
            differed += filled < problem.cost(boundaries)
        assert differed > 5


def chain_of(tables: list[np.ndarray]) -> Problem:
    from gems.profile.spans import RankCosts

    ranks = tuple(
        RankCosts((stage,), ((lambda table=table: table,),)) for stage, table in enumerate(tables)
    )
    return Problem(len(tables[0]), len(tables), ranks, tuple(range(1, len(tables[0]))))


class TestAny:
    def test_inputs_make_costs_not_monotone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = memory_problem("chain", 12, 160, decay=0.99)
        assert not Chain(problem).is_monotone()
        filled, planned = filled_and_not(problem, monkeypatch)
        assert filled == planned

    def test_what_is_not_a_run_of_layers_is_not_read(self) -> None:
        problem = random_problem("chain", 3)
        cost = least(problem)
        for rank in problem.ranks:
            for (table,) in rank.moments:
                made = table()
                made[np.tri(*made.shape, dtype=bool)] = -1e9
        boundaries = partition_chain(problem)
        assert boundaries is not None
        assert (problem.cost(boundaries), problem.crossing_bytes(boundaries)) == cost

    def test_no_cut(self) -> None:
        problem = memory_problem("chain", 4, 10)
        limited = Problem(10, 4, problem.ranks, problem.boundary_bytes, problem.ranks, 1.0)
        assert partition_chain(limited) is None
        assert least_cost(Chain(limited)) == float("inf")

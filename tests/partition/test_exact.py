"""The exact method beside a look at every cut, its proofs, and the peers that it may never be above."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from gems.config.constraints import check_boundaries
from gems.partition.even import even
from gems.partition.exact import solve
from gems.partition.problem import InfeasibleError, Problem
from gems.partition.solvers import paired, relaxed, several
from gems.profile.spans import Table
from tests.helpers.problems import (
    MOST,
    PLACEMENTS,
    every_cut,
    largest,
    least,
    memory_problem,
    random_problem,
)

EXACT = 1e-11  # sums of several tables may come in another order


def check(problem: Problem, budget_s: float = 30.0) -> bool:
    """Solve a problem and compares with every cut; gives whether there was one."""
    cost, crossing = least(problem)
    if cost == float("inf"):
        with pytest.raises(InfeasibleError) as refused:
            solve(problem, budget_s)
        needed = min(
            largest(problem.limits, cut)
            for cut in every_cut(problem.num_layers, problem.num_stages)
        )
        assert refused.value.least == pytest.approx(needed, rel=EXACT)
        assert problem.limit < refused.value.bound <= needed * (1 + EXACT)
        return False
    found = solve(problem, budget_s)
    assert check_boundaries(found.boundaries, problem.num_layers, problem.num_stages)
    assert found.is_optimal
    assert found.facts["has_fewest_bytes"]
    assert found.cost == problem.cost(found.boundaries) == pytest.approx(cost, rel=EXACT)
    assert found.bound <= cost * (1 + EXACT)
    assert found.gap == 0.0
    assert problem.crossing_bytes(found.boundaries) == crossing
    return True


@pytest.mark.parametrize("placement", PLACEMENTS)
class TestEveryCut:
    def test_any_costs(self, placement: str) -> None:
        for seed in range(50):
            assert check(random_problem(placement, seed))

    def test_any_costs_and_limits(self, placement: str) -> None:
        met = [check(random_problem(placement, seed, limited=True)) for seed in range(35)]
        assert 5 < sum(met) < 35, "some have a cut, some have none"

    def test_costs_of_memory(self, placement: str) -> None:
        for seed in range(10):
            for inputs in (True, False):
                assert check(memory_problem(placement, MOST[placement], 12, seed, 0.9, inputs))

    def test_as_large_ones_are_searched(
        self, placement: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(paired, "SMALL", 0)
        monkeypatch.setattr(paired, "CHUNK", 40)
        monkeypatch.setattr(several, "CHUNK", 200)
        monkeypatch.setattr(several, "FIRST_WIDTH", 2)
        monkeypatch.setattr(relaxed, "CUTS_OF_A_ROUND", 10)
        for seed in range(12):
            check(random_problem(placement, seed, limited=seed % 2 == 0, most_layers=10))

    def test_bounds_are_true_when_there_is_no_time(self, placement: str) -> None:
        for seed in range(30):
            problem = random_problem(placement, seed)
            found = solve(problem, 0.0)
            cost, _ = least(problem)
            assert found.bound <= cost * (1 + EXACT)
            assert found.cost == problem.cost(found.boundaries) >= cost * (1 - EXACT)
            if found.is_optimal:
                assert found.cost == pytest.approx(cost, rel=EXACT)


class TestEdges:
    @pytest.mark.parametrize("num_layers", [1, 2, 7])
    def test_one_stage_and_as_many_as_layers(self, num_layers: int) -> None:
        for num_stages in {1, num_layers}:
            problem = memory_problem("chain", num_stages, num_layers)
            assert solve(problem).boundaries == even(num_layers, num_stages)

    def test_a_rank_alone_with_all_stages(self) -> None:
        assert check(memory_problem("wave", 1, 9))

    def test_more_stages_than_layers(self) -> None:
        problem = replace(memory_problem("chain", 3, 4), num_stages=5)
        with pytest.raises(ValueError, match="4 layers make no 5 stages"):
            solve(problem)

    @pytest.mark.parametrize("placement", PLACEMENTS)
    def test_the_least_limit_is_just_enough(self, placement: str) -> None:
        problem = memory_problem(placement, 2, 9)
        limited = replace(problem, limits=problem.ranks, limit=0.0)
        with pytest.raises(InfeasibleError) as refused:
            solve(limited)
        assert solve(replace(limited, limit=refused.value.least)).cost == refused.value.least
        with pytest.raises(InfeasibleError):
            solve(replace(limited, limit=refused.value.least * (1 - 1e-6)))

    def test_a_refusal_travels(self) -> None:
        refused = pickle.loads(pickle.dumps(InfeasibleError(12.0, 10.0, 11.0)))
        assert (refused.least, refused.limit, refused.bound) == (12.0, 10.0, 11.0)
        assert "no partition within 10: the best one needs 12, and none less than 11" in str(
            refused
        )

    def test_tables_are_built_once(self) -> None:
        problem = memory_problem("bidirectional", 5, 12)
        built: list[Counted] = []

        def counted(build: Callable[[], Table]) -> Callable[[], Table]:
            built.append(Counted(build))
            return built[-1]

        ranks = tuple(
            replace(rank, moments=tuple(tuple(map(counted, tables)) for tables in rank.moments))
            for rank in problem.ranks
        )
        solve(replace(problem, ranks=ranks))
        assert {each.calls for each in built} == {1}


class Counted:
    """A table that counts how often it is built."""

    def __init__(self, build: Callable[[], Table]) -> None:
        self._build = build
        self.calls = 0

    def __call__(self) -> Table:
        self.calls += 1
        return self._build()


class TestLarge:
    def test_nearly_monotone_pairs_are_proven(self) -> None:
        found = solve(memory_problem("v", 8, 150, decay=0.99), 30.0)
        assert found.is_optimal
        assert found.facts == {"solver": "pairs", "has_fewest_bytes": True}

    def test_monotone_pairs_meet_their_bound(self) -> None:
        problem = memory_problem("v", 6, 120, inputs=False)
        found = solve(problem, 30.0)
        assert found.is_optimal
        assert paired.Pairs(problem).completable(found.cost) is not None
        assert paired.Pairs(problem).completable(found.cost * (1 - 1e-5)) is None, (
            "no cut there even on paper"
        )

    def test_a_budget_is_kept(self) -> None:
        for placement, ranks in (("looped", 8), ("wave", 4), ("v", 8)):
            problem = memory_problem(placement, ranks, 160, decay=0.99)
            found = solve(problem, 1.0)
            assert found.solve_s < 5.0
            assert found.bound <= found.cost
            assert found.cost <= problem.cost(even(160, problem.num_stages))
            assert found.is_optimal == (found.gap == 0.0)

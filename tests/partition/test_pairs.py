"""Pairs: searches by halves beside plain ones, and frontiers that leave out no cut."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gems.partition.even import even
from gems.partition.solvers import paired
from gems.partition.solvers.paired import Pairs, partition_pairs
from tests.helpers.problems import every_cut, least, memory_problem, random_problem

PAIRED = ("bidirectional", "v", "odd")


@pytest.mark.parametrize("placement", PAIRED)
def test_frontiers_leave_out_no_cut(placement: str) -> None:
    for seed in range(15):
        problem = random_problem(placement, seed, most_layers=9)
        pairs = Pairs(problem)
        assert pairs.lowest <= least(problem)[0] * (1 + 1e-12)
        for cut in every_cut(problem.num_layers, problem.num_stages):
            frontier = pairs.completable(problem.cost(cut))
            assert frontier is not None
            for depth, inner in enumerate(frontier):
                if depth <= problem.num_stages - depth:
                    assert cut[problem.num_stages - depth] <= inner[cut[depth]]


@pytest.mark.parametrize("placement", PAIRED)
def test_no_cut_below_the_frontier(placement: str) -> None:
    problem = memory_problem(placement, 2, 12, inputs=False)
    assert Pairs(problem).completable(Pairs(problem).lowest * (1 - 1e-6)) is None


def test_out_of_time_says_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any time the even cut stands, with a bound that holds.

    The first threshold's bound is a near one.
    """
    monkeypatch.setattr(paired, "SMALL", 0)
    problem = memory_problem("v", 3, 60, seed=1, decay=0.95)
    answer = partition_pairs(problem, time.perf_counter())
    cost = partition_pairs(problem, time.perf_counter() + 20).cost
    assert not answer.is_proven
    assert answer.boundaries == even(60, 6)
    assert 0 < answer.bound <= cost < answer.cost < np.inf
    low, high = paired._bracket(Pairs(problem), answer.cost, time.perf_counter() + 20)
    assert 0.95 * cost < low <= cost
    assert low <= high < answer.cost


def test_enough_is_enough() -> None:
    problem = memory_problem("v", 4, 40)
    answer = partition_pairs(problem, time.perf_counter() + 10, enough=float("inf"))
    assert answer.boundaries is not None
    assert not answer.is_proven

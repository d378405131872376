"""Relaxation and local search: bounds that hold for every cut, and moves that better a cut."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from gems.partition.even import even
from gems.partition.solvers.paired import improve
from gems.partition.solvers.relaxed import Relaxation, Shaker, resettle
from tests.helpers.problems import (
    PLACEMENTS,
    every_cut,
    largest,
    least,
    memory_problem,
    random_problem,
)


def soon() -> float:
    return time.perf_counter() + 20.0


@pytest.mark.parametrize("placement", PLACEMENTS)
class TestBounds:
    def test_any_weights_bound_every_cut(self, placement: str) -> None:
        rng = np.random.default_rng(0)
        for seed in range(10):
            problem = random_problem(placement, seed, limited=seed % 2 == 0, most_layers=9)
            relaxation = Relaxation(problem)
            weights = rng.random(len(relaxation.terms))
            weights[~relaxation.is_limit] /= weights[~relaxation.is_limit].sum()
            bound, path = relaxation.bound(weights)
            cost, _ = least(problem)
            assert bound.value <= cost * (1 + 1e-12)
            assert relaxation.bottleneck() <= cost * (1 + 1e-12)
            mean = sum(w * term.at(path) for w, term in zip(weights, relaxation.terms, strict=True))
            assert mean - bound.offset == pytest.approx(bound.value)
            assert path in every_cut(problem.num_layers, problem.num_stages)

    def test_bounds_rise(self, placement: str) -> None:
        problem = memory_problem(placement, 4, 60, decay=0.98)
        relaxation = Relaxation(problem)
        start = even(60, problem.num_stages)
        shaker = Shaker(problem, start, soon())
        first, _ = relaxation.bound(relaxation._first_weights(shaker.best))
        raised = relaxation.raise_bound(shaker, soon())
        assert first.value <= raised.value <= shaker.cost * (1 + 1e-12)
        if len(problem.ranks) > 1:
            assert first.value < raised.value
        assert shaker.cost == problem.cost(shaker.best) <= problem.cost(start)


class TestMoves:
    @pytest.mark.parametrize("placement", PLACEMENTS)
    @pytest.mark.parametrize("search", [improve, resettle])
    def test_no_move_is_for_the_worse(self, placement: str, search: object) -> None:
        better = 0
        for seed in range(8):
            problem = memory_problem(placement, 4, 30, seed, 0.9)
            start = even(30, problem.num_stages)
            found = search(problem, start, soon())  # type: ignore[operator]
            assert problem.cost(found) <= problem.cost(start)
            if search is resettle:
                assert resettle(problem, found, soon()) == found, (
                    "it ends where nothing is left to do"
                )
            better += problem.cost(found) < problem.cost(start)
        assert better > 2

    def test_a_chain_is_settled_in_one_move(self) -> None:
        problem = memory_problem("chain", 4, 11)
        found = resettle(problem, even(11, 4), soon())
        assert problem.cost(found) == least(problem)[0]

    def test_limits_are_kept(self) -> None:
        for seed in range(30):
            problem = random_problem("looped", seed, limited=True)
            fitting = [
                cut
                for cut in every_cut(problem.num_layers, problem.num_stages)
                if problem.cost(cut) < np.inf
            ]
            for cut in fitting[:3]:
                for search in (improve, resettle):
                    assert problem.cost(search(problem, cut, soon())) <= problem.cost(cut)

    def test_what_is_above_a_limit_comes_down_first(self) -> None:
        problem = memory_problem("v", 2, 12, decay=0.8)
        limited = replace(problem, limits=problem.ranks, limit=1.0)
        found = improve(limited, even(12, 4), soon())
        assert limited.cost(found) == np.inf
        assert largest(problem.ranks, found) < largest(problem.ranks, even(12, 4))

    def test_shaking_is_drawn_from_a_seed(self) -> None:
        problem = memory_problem("looped", 4, 40, decay=0.95)
        start = even(40, 8)
        settled = resettle(problem, start, soon())
        shaker = Shaker(problem, start, soon())
        assert shaker.best == settled
        shaker.shake(time.perf_counter() + 0.3)
        assert shaker.cost < problem.cost(settled)

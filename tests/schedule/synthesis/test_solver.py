"""The exact pattern, where OR-tools is installed."""

from __future__ import annotations

import sys

import pytest

from gems.schedule.costs import DepthCosts, Network
from gems.schedule.placement import Placement, v
from gems.schedule.synthesis.pattern import pattern
from gems.schedule.synthesis.problem import Problem, problem
from gems.schedule.synthesis.solver import is_small, solve
from gems.schedule.synthesis.templates import Budget, patterns

KEEP = (0,) * 8


def made(placement: Placement, cap: float) -> Problem:
    costs = DepthCosts(placement.num_ranks).stages(placement.num_stages)
    return problem("p", placement, 8, costs, Network(), cap)


def test_it_finds_the_optimum_that_the_pattern_misses() -> None:
    pytest.importorskip("ortools")
    case = made(v(4), 1.5)
    plain = [one for one in patterns(case, KEEP, 1, Budget(10**6)) if not one.overflow][-1]
    better = solve(case, plain, Budget(10**7), 0)
    assert better is not None
    assert (plain.period, better.period) == (11, 10)
    relaid = pattern(case, KEEP, 11, (0,))
    assert relaid is not None and len(better.starts[0]) == len(relaid.starts[0])
    again = solve(case, plain, Budget(10**7), 0)
    assert again is not None and again.starts == better.starts


def test_without_the_library_nothing_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    case = made(v(4), 2)
    plain = next(iter(patterns(case, KEEP, 1, Budget(10**6))))
    monkeypatch.setattr(sys.modules[solve.__module__], "IS_INSTALLED", False)
    assert not is_small(case, KEEP, plain)

"""Strips under a cap: more room is never slower, and its bound is never lower."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from gems.schedule.costs import DepthCosts
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.ledger import peaks
from gems.schedule.registry import Request
from gems.schedule.strips import StripCosts
from gems.schedule.synthesis import RUNGS, FoundSchedule, find_schedule


def found_at(cap: float, costs: DepthCosts, num: int, strips: int) -> FoundSchedule:
    request = Request(costs.num_ranks, num, cap=cap, costs=costs, num_strips=strips)
    return find_schedule(request, published_schedules(request))


def check_rise(found: list[FoundSchedule]) -> None:
    for low, high in pairwise(found):
        assert high.span <= low.span * (1 + 1e-9)
        assert high.bound >= low.bound * (
            1 - 1e-9
        ) and high.bound_any_strips >= low.bound_any_strips * (1 - 1e-9)
        assert high.gap == pytest.approx(1 - high.efficiency / high.bound)


@pytest.mark.cases
def test_a_cap_of_one_and_a_fifth_is_no_slower_than_one() -> None:
    """It once took 33.95 units, and 31.77 at a cap of 1."""
    costs = DepthCosts(6, 1.0, 1.3, 0.7)
    found = [found_at(cap, costs, 8, 3) for cap in (1.0, 1.2)]
    check_rise(found)
    assert found[0].span == pytest.approx(30.508, abs=1e-3)
    assert (
        max(peaks(found[1].schedule, StripCosts(costs, 3).of(found[1].schedule.placement)))
        <= 1.2 + 1e-9
    )


@pytest.mark.cases
@pytest.mark.parametrize("seed", range(5))
def test_no_rung_is_slower_than_a_lower_one(seed: int) -> None:
    random = Random(seed)
    num_ranks = random.randint(2, 5)
    num = random.randint(2, 6)
    strips = random.randint(2, 4)
    forward, input_grad, weight_grad = (random.uniform(0.5, 1.5) for _ in range(3))
    costs = DepthCosts(num_ranks, forward, input_grad, weight_grad)
    check_rise([found_at(cap, costs, num, strips) for cap in RUNGS])

"""Patterns: the published closed form of their periods, room on every rank, and annealing."""

from __future__ import annotations

from random import Random

import pytest

from gems.schedule.costs import DepthCosts, Network
from gems.schedule.placement import Placement, bidirectional, linear, v, wave
from gems.schedule.synthesis.pattern import Template, pattern
from gems.schedule.synthesis.problem import Problem, problem
from gems.schedule.synthesis.templates import Budget, anneal, least_period, patterns


def unit(placement: Placement, cap: float, **costs: object) -> Problem:
    stages = DepthCosts(placement.num_ranks, **costs).stages(placement.num_stages)  # type: ignore[arg-type]
    return problem("unit", placement, 8, stages, Network(), cap)


def best(made: Problem, group: int) -> Template:
    found = [
        template
        for template in patterns(made, (0,) * made.num_stages, group, Budget(10**6))
        if not template.overflow
    ]
    return found[-1]


@pytest.mark.parametrize("num_ranks", range(2, 13))
@pytest.mark.parametrize("cap", [1, 2, 3, 4])
def test_the_period_of_v_has_a_closed_form(num_ranks: int, cap: int) -> None:
    over = 2 * (num_ranks + 1) // cap + 1  # the smallest integer strictly above 2 (P + 1) / K
    assert best(unit(v(num_ranks), cap), 1).period == max(6, over + over % 2)


@pytest.mark.parametrize("num_ranks", range(3, 12))
def test_the_periods_of_the_wave_and_of_two_directions_at_cap_one(num_ranks: int) -> None:
    assert best(unit(wave(num_ranks, 4), 1), 1).period == 4 * num_ranks + 4
    assert best(unit(bidirectional(num_ranks), 1), 2).period == 2 * num_ranks + 4


@pytest.mark.parametrize(
    ("placement", "cap", "group"), [(v(4), 1.5, 2), (wave(3, 4), 1.25, 2), (linear(5), 2, 1)]
)
def test_a_pattern_repeats_without_a_clash_and_keeps_the_cap(
    placement: Placement, cap: float, group: int
) -> None:
    made = unit(placement, cap, forward=1, input_grad=1.5, weight_grad=0.5)
    found = best(made, group)
    lengths = (*made.time_grains, *made.weight_grains)
    ranks = (*made.rank[0], *placement.ranks[0])
    busy: dict[tuple[int, int], int] = {}
    for row in found.starts:
        for operation, start in enumerate(row):
            for tick in range(start, start + lengths[operation]):
                key = (ranks[operation], tick % found.period)
                busy[key] = busy.get(key, 0) + 1
        for c in range(1, 2 * made.num_stages):
            assert row[c] >= row[c - 1] + lengths[c - 1]
    assert set(busy.values()) == {1}
    for tick in range(20 * found.period, 21 * found.period):
        held = [0] * placement.num_ranks
        for row in found.starts:
            for turn in range(21):
                for stage in range(made.num_stages):
                    weight = 2 * made.num_stages + stage
                    begin = row[stage]
                    end = row[weight] + lengths[weight]
                    if begin <= tick - turn * found.period < end:
                        held[ranks[stage]] += made.size[stage]
        assert max(held) <= made.cap


def test_a_full_ring_gives_no_pattern() -> None:
    made = unit(linear(2), 4)
    assert pattern(made, (0, 0), 2, (0,)) is None
    assert pattern(made, (0, 0), 3, (0,)) is not None


def test_annealing_finds_a_shorter_period_that_keeps_the_cap() -> None:
    made = unit(wave(4, 4), 1.5, forward=1, input_grad=1.2, weight_grad=0.8)
    keep = (0,) * made.num_stages
    plain = best(made, 1)
    better = anneal(made, keep, plain, Budget(10**6), Random(1))
    assert better is not None and better.overflow == 0
    assert least_period(made, keep, 1) <= better.period < plain.period
    assert anneal(made, keep, plain, Budget(0), Random(1)) is None

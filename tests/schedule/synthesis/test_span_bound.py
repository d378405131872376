"""The bounds on a step's time, against closed forms, every order at tiny sizes, and what the search finds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gems.errors import ConfigError
from gems.schedule.costs import DepthCosts, Network, StageCosts
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.placement import Placement, bidirectional, linear, looped, v, wave
from gems.schedule.registry import Request
from gems.schedule.synthesis import find_schedule
from gems.schedule.synthesis.bound import rough_span, span_bound
from tests.helpers.every_order import least_span

MANY = 10**6


def counts_of(placement: Placement, num: int) -> list[int]:
    return [num] if placement.num_directions == 1 else [num - num // 2, num // 2]


def rough(
    placement: Placement, num: int, cap: float, allow: tuple[str, ...] = (), **costs: object
) -> float:
    made = DepthCosts(placement.num_ranks, **costs)  # type: ignore[arg-type]
    stages = made.stages(placement.num_stages)
    work = num * (made.forward + made.input_grad + made.weight_grad)
    return work / rough_span(stages, placement, counts_of(placement, num), cap, allow=allow)


def bound(placement: Placement, num: int, cap: float) -> float:
    stages = DepthCosts(placement.num_ranks).stages(placement.num_stages)
    return 3 * num / span_bound(stages, placement, counts_of(placement, num), cap)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("cap", [1, 2])
def test_the_memory_time_bounds_have_closed_forms(num_ranks: int, cap: int) -> None:
    for placement, expected in (
        (linear(num_ranks), 3 / (2 * num_ranks + 1)),
        (bidirectional(num_ranks), 3 / (num_ranks + 2)),
        (v(num_ranks), 3 / (num_ranks + 1)),
        (wave(num_ranks, 4), 3 / (num_ranks + 0.5)),
    ):
        assert rough(placement, MANY, cap) == pytest.approx(min(1.0, cap * expected), rel=1e-4)


@pytest.mark.parametrize(
    ("placement", "allow", "copy", "least"),
    [
        (v(8), ("recompute",), 0.0, 0.814),
        (wave(8, 4), ("recompute",), 0.0, 0.875),
        (wave(8, 4), ("offload",), 2.0, 1.0),
        (v(8), ("offload",), 2.0, 0.857),
    ],
)
def test_with_memory_actions_it_is_not_below_the_fractional_optimum(
    placement: Placement, allow: tuple[str, ...], copy: float, least: float
) -> None:
    found = rough(placement, MANY, 1, allow, copy=copy)
    assert least - 0.001 <= found <= 1.0 + 1e-9
    assert found > 1.5 * rough(placement, MANY, 1)


def test_fill_and_drain_of_a_small_step_are_counted() -> None:
    # one micro-batch on P ranks: P forwards, P input gradients and a weight gradient, of 3 P units
    # of work
    assert bound(linear(5), 1, 1) == pytest.approx(15 / 11 / 5)
    # with room for all, the last rank waits P - 1 forwards for its first
    assert bound(linear(5), 10, 100) == pytest.approx(30 / 34)
    # rank 0 forwards what its cap of 2 holds and waits for the first gradient: it idles 2 x 4 + 1 -
    # 2 units
    assert bound(linear(5), 50, 2.5) <= 150 / 157


@pytest.mark.parametrize(
    ("num_ranks", "num", "cap", "most"),
    [
        (8, 32, 1, 0.3535),
        (8, 32, 1.5, 0.4785),
        (8, 32, 2, 0.688),
        (8, 32, 3, 0.916),
        (8, 32, 4, 0.943),
        (16, 64, 2, 0.359),
        (16, 64, 4, 0.698),
    ],
)
def test_the_printed_bound_is_as_tight_as_the_documentation_says(
    num_ranks: int, num: int, cap: float, most: float
) -> None:
    p = num_ranks
    assert (
        max(
            bound(each, num, cap)
            for each in (linear(p), bidirectional(p), v(p), wave(p, 4), wave(p, 8))
        )
        <= most
    )


@pytest.mark.parametrize(
    ("placement", "num", "cap", "optimum", "near"),
    [
        (v(4), 8, 1, 0.475, 1.17),
        (v(4), 8, 1.5, 0.558, 1.1),
        (v(4), 8, 2, 0.814, 1.1),
        (v(8), 16, 2, 0.536, 1.12),
        (v(8), 16, 3, 0.722, 1.15),
        (bidirectional(4), 8, 2, 0.75, 1.2),
        (wave(4, 4), 8, 1.5, 0.733, 1.1),
    ],
)
def test_it_is_near_optima_that_were_proved(
    placement: Placement, num: int, cap: float, optimum: float, near: float
) -> None:
    assert optimum - 0.0005 <= bound(placement, num, cap) <= near * optimum + 0.0005


def test_no_order_of_a_tiny_step_is_shorter() -> None:
    random = Random(5)
    tight = 0
    for _ in range(60):
        num_ranks = random.choice((1, 2, 2, 3))
        placements = [linear(num_ranks), bidirectional(num_ranks)]
        placements += (
            [v(1), wave(1, 3)] if num_ranks == 1 else [looped(2, 1)] if num_ranks == 2 else []
        )
        placement = random.choice(placements)
        num_stages = placement.num_stages
        num = random.randint(1, 6 // num_stages)
        down = num if placement.num_directions == 1 else random.randint(0, num)
        counts = [down] if placement.num_directions == 1 else [down, num - down]

        def draw(low: int, high: int, length: int = num_stages) -> tuple[float, ...]:
            return tuple(float(random.randint(low, high)) for _ in range(length))

        size = draw(1, 3)
        held = size if random.random() < 0.5 else tuple(random.choice((0.5, 1.0)) for _ in size)
        costs = StageCosts(draw(1, 3), draw(1, 3), draw(0, 3), size, held_for_weights=held)
        whole = max(
            sum(size[stage] for _, stage in placement.stages_on(rank)) for rank in range(num_ranks)
        )
        cap = whole * random.choice((1.0, 1.5, 2.0))
        delay = random.choice((0.0, 0.0, 1.0))
        optimum = least_span(costs, placement, counts, cap, delay)
        found = span_bound(costs, placement, counts, cap, Network(latency=delay))
        assert found <= optimum, (placement, counts, costs, cap, delay)
        tight += found > optimum * (1 - 1e-6)
    assert tight > 30


def test_times_that_are_no_fractions_do_not_let_it_be_passed() -> None:
    """As times in seconds from a profile are.

    In whole microseconds they were rounded up, and one in ten passed it.
    """
    random = Random(3)
    for _ in range(30):
        num_ranks = random.randint(1, 3)
        forward, input_grad, weight_grad = (random.uniform(1e-4, 5e-4) for _ in range(3))
        weights = [
            tuple(random.uniform(0.3, 1.0) for _ in range(random.choice((1, 2, 7))))
            for _ in range(2)
        ]
        asked = Request(
            num_ranks,
            random.randint(1, 5),
            cap=random.choice((1.0, 1.5, 2.0, 4.0)),
            costs=DepthCosts(
                num_ranks,
                forward,
                input_grad,
                weight_grad,
                times=weights[0],
                activations=weights[1],
            ),
            network=Network(latency=random.choice((0.0, 2e-5))),
            budget_s=0.01,
            placements=random.choice((("linear",), ("v",), ("bidirectional",))),
        )
        try:
            found = find_schedule(asked, published_schedules(asked))
        except ConfigError:
            continue
        assert found.efficiency <= found.bound, asked


def test_the_winner_is_bounded_by_its_own_directions() -> None:
    """A schedule whose directions do not take turns is not judged by those that do."""
    costs = DepthCosts(2, times=(1.0, 3.0))
    asked = Request(2, 3, cap=3.0, costs=costs, budget_s=0.01, placements=("bidirectional",))
    alone = find_schedule(replace(asked, placements=("linear",))).schedule
    one_way = replace(alone, placement=bidirectional(2))
    assert find_schedule(asked, [one_way]).bound >= find_schedule(asked).efficiency
    stages = costs.stages(2)
    assert span_bound(stages, bidirectional(2), [3, 0], 3.0) == pytest.approx(
        span_bound(stages, linear(2), [3], 3.0)
    )

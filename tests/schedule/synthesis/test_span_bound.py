"""The bound on a step's time, against closed forms and against the best schedules of small sizes."""

from __future__ import annotations

import pytest

from gems.schedule.costs import DepthCosts, Network, StageCosts
from gems.schedule.placement import Placement, bidirectional, linear, v, wave
from gems.schedule.synthesis.bound import span_bound
from gems.schedule.synthesis.problem import problem

MANY = 10**6


def efficiency(placement: Placement, num: int, cap: float, allow: tuple[str, ...] = (), **costs: object) -> float:
    stages: StageCosts = DepthCosts(placement.num_ranks, **costs).stages(placement.num_stages)  # type: ignore[arg-type]
    made = problem("p", placement, num, stages, Network(), cap)
    return num * made.work() / placement.num_ranks / span_bound(made, allow)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("cap", [1, 2])
def test_the_memory_time_bounds_have_closed_forms(num_ranks: int, cap: int) -> None:
    for placement, expected in (
        (linear(num_ranks), 3 / (2 * num_ranks + 1)),
        (bidirectional(num_ranks), 3 / (num_ranks + 2)),
        (v(num_ranks), 3 / (num_ranks + 1)),
        (wave(num_ranks, 4), 3 / (num_ranks + 0.5)),
    ):
        assert efficiency(placement, MANY, cap) == pytest.approx(min(1.0, cap * expected), rel=1e-4)


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
    bound = efficiency(placement, MANY, 1, allow, copy=copy)
    assert least - 0.001 <= bound <= 1.0 + 1e-9
    assert bound > 1.5 * efficiency(placement, MANY, 1)


def test_fill_and_drain_of_a_small_step_are_counted() -> None:
    # one micro-batch on P ranks: P forwards, P input gradients and a weight gradient, of 3 P units of work
    assert efficiency(linear(5), 1, 1) == pytest.approx(15 / 11 / 5)
    # with room for all, the last rank waits P - 1 forwards for its first
    assert efficiency(linear(5), 10, 100) == pytest.approx(30 / 34)

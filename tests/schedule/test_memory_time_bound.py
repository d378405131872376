"""gems.schedule.bounds: the bound against its published values, and against every schedule there is."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gems.errors import ConfigError, ScheduleError
from gems.schedule import generate, published
from gems.schedule.bounds import memory_time_bound
from gems.schedule.costs import DepthCosts, Network, StageCosts, uniform
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, bidirectional, linear, looped, v, wave
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from tests.helpers.drawings import with_rows


@pytest.mark.parametrize("num_ranks", range(1, 17))
@pytest.mark.parametrize("cap", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_closed_forms_with_equal_thirds(num_ranks: int, cap: float) -> None:
    """f = i = w: linear 1/P and 3/(2P+1), bidirectional 6/(3P+3) and 3/(P+2), V 3/(P+1), four chunks 3/(P+1/2)."""
    p = num_ranks
    for placement, is_split, rate in (
        (linear(p), False, 1 / p),
        (linear(p), True, 3 / (2 * p + 1)),
        (bidirectional(p), False, 6 / (3 * p + 3)),
        (bidirectional(p), True, 3 / (p + 2)),
        (v(p), True, 3 / (p + 1)),
        (wave(p, 4), True, 3 / (p + 0.5)),
    ):
        found = memory_time_bound(uniform(p, placement.num_stages), placement, cap, is_split)
        assert found == pytest.approx(min(1.0, cap * rate))


@pytest.mark.parametrize(
    ("placement", "cap", "allow", "copy", "expected"),
    [
        (linear(8), 1, "recompute", 0, 0.763),
        (v(8), 1, "recompute", 0, 0.814),
        (v(8), 2, "recompute", 0, 0.909),
        (wave(8, 4), 1, "recompute", 0, 0.875),
        (wave(8, 4), 1.5, "recompute", 0, 0.910),
        (v(4), 1, "recompute", 0, 0.882),
        (wave(4, 4), 1, "recompute", 0, 0.933),
        (v(16), 1, "recompute", 0, 0.780),
        (wave(16, 4), 1, "recompute", 0, 0.828),
        (linear(8), 1, "offload", 1, 0.60),
        (v(8), 1, "offload", 2, 0.857),
        (wave(8, 4), 1, "offload", 2, 1.0),
        (v(8), 1.5, "offload", 2, 1.0),
        (v(16), 1, "offload", 2, 0.857),
    ],
)
def test_limits_with_memory_actions(
    placement: Placement, cap: float, allow: str, copy: float, expected: float
) -> None:
    """Steady-state limits of a linear program for each rank, computed apart from this code."""
    costs = DepthCosts(placement.num_ranks, copy=copy).stages(placement.num_stages)
    assert memory_time_bound(costs, placement, cap, True, allow=(allow,)) == pytest.approx(
        expected, abs=6e-4
    )


def test_links_prolong_what_is_held() -> None:
    """P = 2, split: rank 0 holds f + c + f + i + c + i + w = 5 + 2c a micro-batch of 3, so at most 3 / (5 + 2c)."""
    costs = uniform(2, 2)
    for delay in (0.0, 0.5, 2.0):
        found = memory_time_bound(costs, linear(2), 1.0, True, Network(latency=delay))
        assert found == pytest.approx(3 / (5 + 2 * delay))


def test_no_cap_leaves_the_ranks_work() -> None:
    """Rank 0 has twice the work of rank 1: three quarters at best."""
    costs = StageCosts((2.0, 1.0), (2.0, 1.0), (2.0, 1.0), (1.0, 1.0))
    assert memory_time_bound(costs, linear(2), None, True) == pytest.approx(0.75)
    assert memory_time_bound(costs, linear(2), math.inf, False) == pytest.approx(0.75)


def test_what_is_held_for_the_weights_counts() -> None:
    """Between I and W a tenth stays: 4 + 0.1 in the place of 5."""
    costs = uniform(2, 2)
    less = StageCosts(
        costs.forward,
        costs.input_grad,
        costs.weight_grad,
        costs.activation,
        held_for_weights=(0.1, 0.1),
    )
    assert memory_time_bound(less, linear(2), 1.0, True) == pytest.approx(3 / 4.1)


@given(
    name=st.sampled_from(published()),
    num_ranks=st.integers(1, 5),
    rounds=st.integers(1, 2),
    times=st.tuples(*[st.sampled_from([0.5, 1.0, 1.5, 2.0])] * 3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    delay=st.sampled_from([0.0, 0.25, 1.0]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_no_schedule_is_above_the_bound(
    name: str, num_ranks: int, rounds: int, times: tuple[float, ...], sizes: list[int], delay: float
) -> None:
    try:
        made = generate(name, num_ranks, 2 * rounds * num_ranks, num_ranks)
    except ConfigError:
        assume(False)
    costs = DepthCosts(num_ranks, *times, activations=tuple(map(float, sizes))).stages(
        made.num_stages
    )
    network = Network(latency=delay)
    for schedule in (made, lower(made)):
        played = simulate(schedule, costs, network)
        cap = max(played.peak)
        bound = memory_time_bound(costs, made.placement, cap, made.has_split_backward, network)
        assert played.efficiency <= bound + 1e-9


@pytest.mark.parametrize(
    ("row", "allow"),
    [
        ("0F0 0F1 0R1 0I1 0W1 0R0 0I0 0W0", "recompute"),
        ("0F0 0OFFLOAD0 0F1 0I1 0W1 0PREFETCH0 0I0 0W0", "offload"),
    ],
)
def test_no_schedule_with_memory_actions_is_above_the_bound(row: str, allow: str) -> None:
    made = with_rows(Schedule("one", 2, linear(1), ((),)), [row])
    costs = DepthCosts(1, copy=0.5).stages(1)
    played = simulate(made, costs, cap=1.0)
    assert played.efficiency <= memory_time_bound(costs, made.placement, 1.0, True, allow=(allow,))


def test_more_memory_is_never_worse() -> None:
    costs = DepthCosts(4, copy=2.0, activations=(4.0, 2.0, 1.0, 1.0))
    for placement in (linear(4), bidirectional(4), v(4), looped(4, 2)):
        for allow in ((), ("recompute",), ("offload",), ("recompute", "offload")):
            found = [
                memory_time_bound(
                    costs.stages(placement.num_stages),
                    placement,
                    float(Fraction(k, 4)),
                    True,
                    allow=allow,
                )
                for k in range(1, 17)
            ]
            assert found == sorted(found) and 0 < found[0] < found[-1] <= 1.0


def test_a_rank_with_no_room_at_all_is_refused_by_the_simulation_not_by_the_bound() -> None:
    with pytest.raises(ScheduleError):
        simulate(generate("gpipe", 2, 2), uniform(2, 2), cap=0.5)
    assert memory_time_bound(uniform(2, 2), linear(2), 0.5, False) == pytest.approx(0.25)

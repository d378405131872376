"""The planner of Pal et al..

The criterion, crossings and the best workers x degree against brute force.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gems.errors import ConfigError
from gems.search.hybrid.device_allocation import (
    NEARLY,
    WorkerChoice,
    device_counts,
    picks,
    plan_hybrid,
)
from gems.search.hybrid.end_to_end_time import (
    EfficiencyTable,
    HybridCase,
    break_even,
    ideal_efficiency,
)
from gems.search.hybrid.epochs import EpochTable, NoiseScale, fit_noise_scale
from gems.search.hybrid.quantity import Quantity, drawn, is_exact

EXACT = Quantity.exact
COUNTS = tuple(2**k for k in range(9))
POSITIVE = st.floats(0.05, 20.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[HybridCase, dict[float, float], dict[int, float]]:
    """Return a case with epochs and efficiencies at all powers of two, and these as plain tables."""
    batch = draw(st.sampled_from([1.0, 8.0, 64.0]))
    epochs = {batch * count: draw(POSITIVE) for count in COUNTS}
    efficiencies = {count: draw(st.floats(0.05, 1.0)) for count in COUNTS}
    speedups = {
        degree: EXACT(draw(st.floats(0.5, 8.0)))
        for degree in draw(st.sets(st.sampled_from([2, 4, 8]), min_size=1))
    }
    table = EfficiencyTable({1: {count: EXACT(each) for count, each in efficiencies.items()}})
    case = HybridCase(
        batch,
        EpochTable.of(epochs),
        speedups,
        table,
        EXACT(draw(POSITIVE)),
        draw(st.integers(1, 10**6)),
    )
    return case, epochs, efficiencies


def seconds(
    case: HybridCase,
    epochs: dict[float, float],
    efficiencies: dict[int, float],
    workers: int,
    degree: int,
) -> float:
    """C = T x S x E, each by its own definition."""
    assert case.step_s is not None and case.num_samples is not None
    speedup = 1.0 if degree == 1 else case.speedups[degree].value
    step_s = case.step_s.value / speedup / efficiencies[workers]
    steps = case.num_samples / (workers * case.worker_batch)
    return step_s * steps * epochs[workers * case.worker_batch]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_best_and_criterion_are_those_of_brute_force(
    given_: tuple[HybridCase, dict[float, float], dict[int, float]],
) -> None:
    case, *tables = given_
    plan = plan_hybrid(case, COUNTS)
    assert [allocation.devices for allocation in plan.allocations] == list(COUNTS)
    for allocation in plan.allocations:
        times = {
            degree: seconds(case, *tables, allocation.devices // degree, degree)
            for degree in case.degrees
            if allocation.devices % degree == 0
        }
        assert not allocation.left_out and {choice.degree for choice in allocation.choices} == set(
            times
        )
        ordered = [times[choice.degree] for choice in allocation.choices]
        assert ordered == pytest.approx(sorted(times.values()))
        for choice in allocation.choices:
            assert choice.time_s is not None and choice.gpu_hours is not None
            assert choice.time_s.value == pytest.approx(times[choice.degree])
            assert choice.gpu_hours.value == pytest.approx(
                times[choice.degree] * allocation.devices / 3600
            )
            if choice.degree == 1:
                assert choice.gain is None
                continue
            assert choice.gain is not None
            assert choice.gain.value == pytest.approx(times[1] / times[choice.degree])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_crossing_is_where_a_scan_finds_it(
    given_: tuple[HybridCase, dict[float, float], dict[int, float]],
) -> None:
    case, *_ = given_
    for degree in case.degrees[1:]:
        found = break_even(case, degree, COUNTS)
        gains = {
            count: case.gain(count // degree, degree) for count in COUNTS if count % degree == 0
        }
        later = [
            count for count in gains if all(gains[other] > 1.0 for other in gains if other >= count)
        ]
        assert found.listed == (min(later) if later else None)
        if not later:
            assert found.devices is None and found.below == max(gains)
        elif found.below is not None:
            assert found.devices is not None and found.below < found.devices <= min(later)
            assert case.gain(found.devices // degree, degree) > 1.0
            before = found.devices - degree
            assert before == 0 or case.gain(before // degree, degree) <= 1.0
        else:
            assert found.devices == min(gains)


@settings(max_examples=100, deadline=None)
@given(st.floats(1.05, 1.95), st.floats(30.0, 3e4), st.sampled_from([1.0, 16.0, 64.0]))
def test_the_crossing_under_a_noise_scale_is_the_closed_form(
    speedup: float, critical: float, batch: float
) -> None:
    law = NoiseScale(EXACT(3.0), EXACT(critical))
    case = HybridCase(batch, law, {2: EXACT(speedup)})
    place = (2.0 - speedup) / (speedup - 1.0) * critical / batch
    assume(2 < place < 4000 and abs(place / 2 - round(place / 2)) > 1e-6)
    found = break_even(case, 2, device_counts((2,), 4096))
    assert found.devices == 2 * math.ceil(place / 2)


def test_equal_epochs_and_no_losses_leave_data_parallelism_first() -> None:
    case = HybridCase(8.0, EpochTable.of({8: 4, 8192: 4}), {2: EXACT(1.9), 4: EXACT(3.9)})
    plan = plan_hybrid(case, device_counts(case.degrees, 1024))
    assert all(allocation.choices[0].degree == 1 for allocation in plan.allocations)
    assert [(each.devices, each.below) for each in plan.break_evens] == [(None, 1024), (None, 1024)]
    assert plan.base == (1, 1)
    assert [
        allocation.choices[0].speedup.value for allocation in plan.allocations
    ] == pytest.approx([allocation.devices for allocation in plan.allocations])
    assert all(
        choice.time_s is None for allocation in plan.allocations for choice in allocation.choices
    ), "no step time was given"


def test_ways_that_are_no_power_of_two_have_numbers_of_their_own() -> None:
    assert device_counts((2, 3), 12) == (1, 2, 3, 4, 6, 8, 12)
    case = HybridCase(1.0, NoiseScale(EXACT(1.0), EXACT(4.0)), {3: EXACT(2.9)})
    by_devices = {
        allocation.devices: {choice.degree for choice in allocation.choices}
        for allocation in plan_hybrid(case, (1, 3, 4, 6)).allocations
    }
    assert by_devices == {1: {1}, 3: {1, 3}, 4: {1}, 6: {1, 3}}


def test_what_does_not_fit_is_left_out_with_its_reason() -> None:
    case = HybridCase(
        8.0,
        EpochTable.of({8: 4, 4096: 9}),
        {2: EXACT(1.5), 4: EXACT(2.0)},
        misfits={1: "too large"},
    )
    plan = plan_hybrid(case, (1, 2, 4, 1024))
    assert plan.base == (1, 2) and plan.break_evens == ()
    assert [set(allocation.left_out) for allocation in plan.allocations] == [{1}, {1}, {1}, {1}]
    assert plan.allocations[0].choices == () and plan.allocations[0].left_out[1] == "too large"
    assert all(
        choice.gain is None for allocation in plan.allocations for choice in allocation.choices
    )
    only_two = plan_hybrid(HybridCase(8.0, case.epochs, case.speedups, misfits={2: "no"}), (4, 8))
    assert [each.degree for each in only_two.break_evens] == [4]


def test_unknown_epochs_are_left_out_and_nothing_known_is_refused() -> None:
    case = HybridCase(8.0, EpochTable.of({16: 4, 64: 9}), {2: EXACT(1.5)})
    by_devices = {
        allocation.devices: allocation
        for allocation in plan_hybrid(case, (1, 2, 4, 8, 16, 32)).allocations
    }
    assert by_devices[1].choices == () and "16 to 64" in by_devices[1].left_out[1]
    assert [choice.degree for choice in by_devices[16].choices] == [2] and set(
        by_devices[16].left_out
    ) == {1}
    assert by_devices[16].choices[0].gain is None and by_devices[32].choices == ()
    with pytest.raises(ConfigError, match=r"nothing to weigh.*16 to 64"):
        plan_hybrid(case, (128, 256))


def test_bands_hold_the_value_and_grow_with_the_inputs() -> None:
    def gain(width: float) -> Quantity:
        speedup = Quantity(1.5, 1.5 / width, 1.5 * width)
        case = HybridCase(8.0, EpochTable.of({8: 4, 16: 7}), {2: speedup})
        found = plan_hybrid(case, (2,)).allocations[0].choices
        (each,) = (choice.gain for choice in found if choice.gain is not None)
        return each

    assert is_exact(gain(1.0)) and gain(1.0).value == pytest.approx(1.5 / 2 * 7 / 4)
    narrow = gain(1.1)
    wide = gain(1.4)
    assert narrow.value == wide.value == gain(1.0).value
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert (wide.low, wide.high) == pytest.approx((wide.value / 1.4, wide.value * 1.4), rel=0.1)


def test_the_crossing_has_a_band() -> None:
    law = NoiseScale(Quantity(3.0, 2.9, 3.1), Quantity(1000.0, 500.0, 2000.0))
    case = HybridCase(8.0, law, {2: EXACT(1.5)})
    (found,) = plan_hybrid(case, device_counts((2,), 4096)).break_evens
    assert found.devices == 126 and found.low is not None and found.high is not None
    assert (found.low, found.high) == pytest.approx((62.5, 250.0), rel=0.2)
    unlikely = plan_hybrid(HybridCase(8.0, law, {2: EXACT(1.5)}), (2, 64, 128)).break_evens[0]
    assert unlikely.high is None, "some draws do not cross within 128 devices"


def test_efficiency_between_known_numbers_and_ways() -> None:
    table = EfficiencyTable({1: {1: EXACT(1.0), 4: EXACT(0.8)}, 4: {2: EXACT(0.9), 8: EXACT(0.7)}})
    assert table(2, 1) == pytest.approx(0.9) == table(2, 2) == table(2, 8)
    assert table(4, 4) == pytest.approx(0.8) and table(1, 4) == 1.0
    with pytest.raises(ConfigError, match="known from 1 to 4 workers"):
        table(8, 1)
    assert ideal_efficiency(1024, 8) == 1.0
    rng = np.random.default_rng(0)
    uncertain = EfficiencyTable({1: {1: Quantity(0.9, 0.8, 1.0)}})
    assert (
        not is_exact(uncertain)
        and is_exact(drawn(uncertain, rng))
        and drawn(uncertain, rng)(1, 1) != 0.9
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_picks_are_the_least_of_all(
    given_: tuple[HybridCase, dict[float, float], dict[int, float]],
) -> None:
    case, *tables = given_
    found = picks(plan_hybrid(case, COUNTS))
    assert found
    times = {
        (count // degree, degree): seconds(case, *tables, count // degree, degree)
        for count in COUNTS
        for degree in case.degrees
        if count % degree == 0
    }
    hours = {pair: time_s * pair[0] * pair[1] for pair, time_s in times.items()}
    near = [
        pair
        for pair, time_s in times.items()
        if time_s <= NEARLY * min(times.values()) * (1 + 1e-12)
    ]

    def at(choice: WorkerChoice) -> tuple[int, int]:
        return choice.workers, choice.degree

    assert times[at(found["fastest"])] == pytest.approx(min(times.values()))
    assert hours[at(found["cheapest"])] == pytest.approx(min(hours.values()))
    assert hours[at(found["nearly_fastest"])] == pytest.approx(min(hours[pair] for pair in near))


def test_picks_do_not_stand_on_what_nothing_checks() -> None:
    law = fit_noise_scale([(8, 2.0), (64, 3.0)]).law
    case = HybridCase(8.0, law, {2: EXACT(1.5)})
    found = picks(plan_hybrid(case, COUNTS))
    assert found["fastest"].global_batch == 4 * 64
    assert found["cheapest"].devices == 1

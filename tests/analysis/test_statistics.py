"""Bootstrap intervals, percentiles and means of rates."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.metrics.statistics import (
    Interval,
    further_values,
    harmonic_mean,
    median_draws,
    median_interval,
    percentile,
    percentile_interval,
)
from gems.errors import ConfigError


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 20, 31])
def test_medians_are_drawn_as_resampling_draws_them(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 1000, count).astype(float)
    places = np.random.default_rng(1).integers(0, count, (40_000, count))
    resampled = np.median(values[places], axis=1)
    drawn = median_draws(values, num_draws=40_000)
    possible, chances = np.unique(resampled, return_counts=True)
    assert set(drawn) <= set(np.unique(np.add.outer(values, values) / 2))
    for value, chance in zip(possible, chances / 40_000, strict=True):
        assert np.mean(drawn == value) == pytest.approx(chance, abs=0.015)


@pytest.mark.parametrize(("count", "least"), [(6, 0.90), (20, 0.92), (101, 0.92)])
def test_intervals_hold_the_true_median_as_often_as_they_say(count: int, least: float) -> None:
    """A lognormal distribution is skew: the mean is not the median, and normal theory would miss."""
    rng = np.random.default_rng(5)
    intervals = [median_interval(rng.lognormal(size=count), seed=seed) for seed in range(400)]
    share = np.mean([interval.low <= 1.0 <= interval.high for interval in intervals])
    assert least <= share <= 0.99


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(0).normal(10.0, 1.0, 40)
    assert median_interval(values, seed=3) == median_interval(list(values), seed=3)


def test_too_few_values_have_a_range_that_says_so() -> None:
    few = median_interval([3.0, 1.0, 2.0, 2.5, 4.0])
    assert (few.low, few.value, few.high, few.is_range) == (1.0, 2.5, 4.0, True)
    assert not median_interval([3.0, 1.0, 2.0, 2.5, 4.0, 5.0]).is_range
    one = median_interval([2.0])
    assert (one.low, one.high, one.relative_half_width) == (2.0, 2.0, 0.0)


def test_a_half_width_is_relative_and_intervals_overlap_or_not() -> None:
    assert Interval(9.0, 10.0, 12.0).relative_half_width == pytest.approx(0.15)
    assert Interval(0.0, 0.0, 1.0).relative_half_width == np.inf
    assert Interval(1.0, 2.0, 3.0).overlaps(Interval(3.0, 4.0, 5.0))
    assert not Interval(1.0, 2.0, 3.0).overlaps(Interval(3.1, 4.0, 5.0))


def test_an_interval_of_draws_holds_its_value_and_may_be_endless() -> None:
    assert percentile_interval(np.array([2.0, 3.0]), 1.0).low == 1.0
    endless = percentile_interval(np.array([1.0, 2.0, np.inf, np.inf]), 2.0)
    assert (endless.low, endless.high) == (1.0, np.inf)


def test_rates_have_a_harmonic_mean() -> None:
    """60 km at 30 km/h and 60 km at 60 km/h take 3 h."""
    assert harmonic_mean([30.0, 60.0]) == pytest.approx(40.0)
    assert percentile([1.0, 2.0, 3.0], 75) == pytest.approx(2.5)


def test_steps_to_come_follow_from_the_width() -> None:
    assert (
        further_values(Interval(0.8, 1.0, 1.2), 10, 0.05) == 150
    )  # 4 times too wide: 16 times as many
    assert further_values(Interval(0.96, 1.0, 1.04), 10, 0.05) == 0
    assert further_values(median_interval([1.0, 1.0]), 2, 0.05) == 4


@pytest.mark.parametrize(
    "refused",
    [lambda: median_interval([]), lambda: percentile([], 5), lambda: harmonic_mean([1.0, 0.0])],
)
def test_what_cannot_be_is_refused(refused: object) -> None:
    assert callable(refused)
    with pytest.raises(ConfigError):
        refused()

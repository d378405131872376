"""Statistics of repeated measurements: bootstrap intervals, percentiles and means of rates.

Nothing here assumes a normal distribution. Values are assumed to be independent, which steps of one
run are only approximately: repetitions as jobs of their own tell more than as many further steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gems.errors import ConfigError

LEVEL = 0.95
NUM_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between its bounds.

    With `is_range` the bounds are the least and the largest value, as there are too few for an
    interval. `level` is the share of cases in which such an interval contains the true value;
    meaningless for a range.
    """

    low: float
    value: float
    high: float
    is_range: bool = False
    level: float = LEVEL

    @property
    def relative_half_width(self) -> float:
        """Half the distance between the bounds, over the value."""
        return (self.high - self.low) / (2.0 * abs(self.value)) if self.value else np.inf

    def scaled(self, factor: float) -> Interval:
        """Return the interval of the value times a factor above 0."""
        return replace(
            self, low=factor * self.low, value=factor * self.value, high=factor * self.high
        )

    def overlaps(self, other: Interval) -> bool:
        """Return whether the two have a value in common."""
        return self.low <= other.high and other.low <= self.high


def min_values(level: float = LEVEL) -> int:
    """Return how many values an interval of the median needs: 6 for 95 %.

    The least and the largest of n values hold the median between them in all but 2^(1 - n) of
    cases, whatever the distribution; with fewer values than this no interval between them reaches
    the level.

    Raises:
        ConfigError: a level that is no share between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise ConfigError("level", level, "allowed: above 0 and below 1")
    return 1 + int(np.ceil(np.log2(1.0 / (1.0 - level)) - 1e-9))


def median_draws(
    values: Sequence[float] | np.ndarray, num_draws: int = NUM_DRAWS, seed: int = 0
) -> np.ndarray:
    """Return medians of resamples of `values`, shape (num_draws,), in the unit of the values.

    A resample's median is an order statistic of it, or the mean of two, so the places of these
    among the sorted values are drawn, from their beta distribution. That is exactly the bootstrap
    of the median (Efron 1979), at a cost that does not grow with the number of values.

    Raises:
        ConfigError: no value.
    """
    ordered = _sorted(values)
    count = len(ordered)
    rng = np.random.default_rng(seed)
    upper = count // 2 + 1  # of 1..count
    lower = upper - 1 if count % 2 == 0 else upper
    first = rng.beta(lower, count - lower + 1, num_draws)
    last = (
        first if lower == upper else first + (1.0 - first) * rng.beta(1.0, count - lower, num_draws)
    )
    places = [np.minimum((share * count).astype(int), count - 1) for share in (first, last)]
    drawn: np.ndarray = (ordered[places[0]] + ordered[places[1]]) / 2.0
    return drawn


def median_interval(
    values: Sequence[float] | np.ndarray, level: float = LEVEL, seed: int = 0
) -> Interval:
    """Return the median with its bootstrap interval: the percentiles of the medians of resamples.

    With fewer than `min_values` the bounds are the least and the largest value, and `is_range` is
    set.

    Raises:
        ConfigError: no value, or a level that is no share between 0 and 1.
    """
    ordered = _sorted(values)
    if len(ordered) < min_values(level):
        return Interval(
            float(ordered[0]), float(np.median(ordered)), float(ordered[-1]), True, level
        )
    return percentile_interval(median_draws(ordered, seed=seed), float(np.median(ordered)), level)


def percentile_interval(draws: np.ndarray, value: float, level: float = LEVEL) -> Interval:
    """Return an estimate with the percentiles of its draws as bounds, widened if necessary to contain it."""
    percents = [50 * (1 - level), 50 * (1 + level)]
    is_finite = np.isfinite(draws).all()  # no interpolation between a number and infinity
    low, high = np.percentile(draws, percents, method="linear" if is_finite else "nearest").tolist()
    return Interval(min(low, value), value, max(high, value), False, level)


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """Return a percentile, linear between neighbours; no value is a ConfigError."""
    return float(np.percentile(_sorted(values), percent))


def harmonic_mean(rates: Sequence[float] | np.ndarray) -> float:
    """Return the mean of rates over equal work: that of their costs, as a rate.

    Raises:
        ConfigError: no value, or one that is not positive.
    """
    ordered = _sorted(rates)
    if ordered[0] <= 0.0:
        raise ConfigError("rates", float(ordered[0]), "allowed: above 0")
    return float(1.0 / np.mean(1.0 / ordered))


def further_values(interval: Interval, count: int, relative_half_width: float) -> int:
    """Return how many values more it would take, about, to bring an interval from `count` values to a half width.

    The width falls with the square root of the count. For a range it is the number that an interval
    needs at all.
    """
    if interval.is_range:
        return max(1, min_values(interval.level) - count)
    share = interval.relative_half_width / relative_half_width
    return max(0, int(np.ceil(count * (share * share - 1.0))))


def _sorted(values: Sequence[float] | np.ndarray) -> np.ndarray:
    ordered = np.sort(np.asarray(values, dtype=float))
    if not len(ordered):
        raise ConfigError("values", "none", "at least one value is needed")
    return ordered

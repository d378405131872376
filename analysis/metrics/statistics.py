"""Statistics of repeated measurements: bootstrap intervals, percentiles and means of rates.

Nothing here assumes a normal distribution. Values are assumed to be independent, which is only
approximately true for the steps of one run: repetitions as separate jobs tell more than the same
number of additional steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gems.errors import ConfigError

PERCENTS = (2.5, 97.5)  # the bounds of a 95 % interval
# The median lies between the smallest and the largest of n values in all but 2^(1 - n) of cases,
# whatever the distribution. With fewer values, no interval between them reaches 95 %.
MIN_VALUES = 6
NUM_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between its bounds, which contain the true value in 95 % of cases.

    If `is_range`, the bounds are the smallest and the largest value, because there are too few
    values for an interval.
    """

    low: float
    value: float
    high: float
    is_range: bool = False

    @property
    def relative_half_width(self) -> float:
        """Half the distance between the bounds, divided by the value."""
        return (self.high - self.low) / (2.0 * abs(self.value)) if self.value else np.inf

    def scaled(self, factor: float) -> Interval:
        """Return the interval of the value times a positive factor."""
        return replace(
            self, low=factor * self.low, value=factor * self.value, high=factor * self.high
        )

    def overlaps(self, other: Interval) -> bool:
        """Return whether the two intervals have a value in common."""
        return self.low <= other.high and other.low <= self.high


def median_draws(
    values: Sequence[float] | np.ndarray, num_draws: int = NUM_DRAWS, seed: int = 0
) -> np.ndarray:
    """Return medians of resamples of `values`, shape (num_draws,), in the unit of the values.

    The median of a resample is one of its order statistics, or the mean of two; so their positions
    among the sorted values are drawn from their beta distribution. This is exactly the bootstrap of
    the median (Efron 1979), at a cost that does not grow with the number of values.

    Raises:
        ConfigError: There are no values.
    """
    ordered = _sorted(values)
    count = len(ordered)
    rng = np.random.default_rng(seed)
    upper = count // 2 + 1  # in 1..count
    lower = upper - 1 if count % 2 == 0 else upper
    first = rng.beta(lower, count - lower + 1, num_draws)
    last = (
        first if lower == upper else first + (1.0 - first) * rng.beta(1.0, count - lower, num_draws)
    )
    places = [np.minimum((share * count).astype(int), count - 1) for share in (first, last)]
    drawn: np.ndarray = (ordered[places[0]] + ordered[places[1]]) / 2.0
    return drawn


def median_interval(values: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Return the median with its bootstrap interval: the percentiles of the medians of resamples.

    With fewer than `MIN_VALUES`, the bounds are the smallest and the largest value, and `is_range`
    is set.

    Raises:
        ConfigError: There are no values.
    """
    ordered = _sorted(values)
    median = float(np.median(ordered))
    if len(ordered) < MIN_VALUES:
        return Interval(float(ordered[0]), median, float(ordered[-1]), True)
    return percentile_interval(median_draws(ordered, seed=seed), median)


def percentile_interval(draws: np.ndarray, value: float) -> Interval:
    """Return an estimate with the percentiles of its draws as bounds.

    The bounds are widened if necessary to contain the estimate.
    """
    # interpolation between a number and infinity is impossible
    is_finite = np.isfinite(draws).all()
    low, high = np.percentile(draws, PERCENTS, method="linear" if is_finite else "nearest").tolist()
    return Interval(min(low, value), value, max(high, value))


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """Return a percentile, linear between neighbours.

    Raises:
        ConfigError: There are no values.
    """
    return float(np.percentile(_sorted(values), percent))


def harmonic_mean(rates: Sequence[float] | np.ndarray) -> float:
    """Return the mean of rates over equal work, that is, the inverse of the mean of their costs.

    Raises:
        ConfigError: There are no values, or a value is not positive.
    """
    ordered = _sorted(rates)
    if ordered[0] <= 0.0:
        raise ConfigError("rates", float(ordered[0]), "allowed: above 0")
    return float(1.0 / np.mean(1.0 / ordered))


def further_values(interval: Interval, count: int, relative_half_width: float) -> int:
    """Return about how many more values are needed for a given half width of an interval.

    `count` is the current number of values; the width falls with the square root of the count. For
    a range, the result is the number of values that an interval needs at all.
    """
    if interval.is_range:
        return max(1, MIN_VALUES - count)
    share = interval.relative_half_width / relative_half_width
    return max(0, int(np.ceil(count * (share * share - 1.0))))


def _sorted(values: Sequence[float] | np.ndarray) -> np.ndarray:
    ordered = np.sort(np.asarray(values, dtype=float))
    if not len(ordered):
        raise ConfigError("values", "none", "at least one value is needed")
    return ordered

"""A figure that is not known exactly: its value, its interval, and draws from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

# A standard normal deviate lies within these with a probability of 95 %.
Z95 = 1.959963984540054
SHARES = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A positive figure with its 95 % interval, `low` <= `value` <= `high`, in one unit."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.value <= self.high or not math.isfinite(self.high):
            raise ValueError(
                f"must be above 0 and finite, within its interval: {self.low:g} <= {self.value:g}"
                f" <= {self.high:g}"
            )

    @classmethod
    def exact(cls, value: float) -> Quantity:
        """Return a figure without uncertainty."""
        return cls(value, value, value)

    def at(self, deviate: float) -> float:
        """Return the figure for a standard normal deviate.

        0 gives the value, -Z95 and Z95 the ends of the interval.
        Each side is a half of a log-normal distribution, so that no draw of a positive figure is
        negative.
        """
        end = self.low if deviate < 0 else self.high
        return (
            self.value
            if end == self.value
            else self.value * (end / self.value) ** (abs(deviate) / Z95)
        )

    def drawn(self, rng: np.random.Generator) -> Quantity:
        """Return one exact figure drawn from the interval's distribution."""
        return (
            self if self.low == self.high else Quantity.exact(self.at(float(rng.standard_normal())))
        )

    def scaled(self, factor: float) -> Quantity:
        """Return the figure and its interval times a positive factor."""
        return Quantity(self.value * factor, self.low * factor, self.high * factor)


def drawn(given: Any, rng: np.random.Generator) -> Any:
    """Return a value with each figure in it drawn independently.

    These are quantities, in mappings, tuples and dataclasses; one with a method `drawn` of its own
    draws by that.
    """
    if hasattr(given, "drawn"):
        return given.drawn(rng)
    if isinstance(given, Mapping):
        return {key: drawn(each, rng) for key, each in given.items()}
    if isinstance(given, tuple):
        return tuple(drawn(each, rng) for each in given)
    if is_dataclass(given) and not isinstance(given, type):
        return replace(
            given, **{each.name: drawn(getattr(given, each.name), rng) for each in fields(given)}
        )
    return given


def is_exact(given: Any) -> bool:
    """Return whether no figure in a value has an interval, so that every draw is the value itself."""
    return bool(drawn(given, np.random.default_rng(0)) == given)


def band(value: float, draws: Sequence[float]) -> Quantity:
    """Return a positive figure with the middle 95 % of its draws, widened to the value where that lies outside."""
    if not draws:
        return Quantity.exact(value)
    low, high = (float(np.quantile(draws, share)) for share in SHARES)
    return Quantity(value, min(low, value), max(high, value))

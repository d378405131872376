"""Quantities with uncertainty: a value, its interval, and draws from it."""

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
    """A positive number with its 95 % interval, `low` <= `value` <= `high`, in one unit."""

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
        """Return a quantity without uncertainty."""
        return cls(value, value, value)

    def at(self, deviate: float) -> float:
        """Return the number for a standard normal deviate.

        0 gives the value, -Z95 and Z95 the ends of the interval. Each side is half of a log-normal
        distribution, so draws are positive.
        """
        end = self.low if deviate < 0 else self.high
        return (
            self.value
            if end == self.value
            else self.value * (end / self.value) ** (abs(deviate) / Z95)
        )

    def drawn(self, rng: np.random.Generator) -> Quantity:
        """Draw an exact quantity from the distribution."""
        return (
            self if self.low == self.high else Quantity.exact(self.at(float(rng.standard_normal())))
        )

    def scaled(self, factor: float) -> Quantity:
        """Return the quantity times a positive factor."""
        return Quantity(self.value * factor, self.low * factor, self.high * factor)


def drawn(value: Any, rng: np.random.Generator) -> Any:
    """Return a value with every quantity in it drawn independently.

    Mappings, tuples and dataclasses are searched for quantities. Objects with a method `drawn` draw
    themselves.
    """
    if hasattr(value, "drawn"):
        return value.drawn(rng)
    if isinstance(value, Mapping):
        return {key: drawn(item, rng) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(drawn(item, rng) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: drawn(getattr(value, field.name), rng) for field in fields(value)}
        )
    return value


def is_exact(value: Any) -> bool:
    """Return whether a value contains no uncertainty, so every draw equals it."""
    return bool(drawn(value, np.random.default_rng(0)) == value)


def band(value: float, draws: Sequence[float]) -> Quantity:
    """Return a value with the central 95 % of its draws, widened to include the value."""
    if not draws:
        return Quantity.exact(value)
    low, high = map(float, np.quantile(draws, SHARES))
    return Quantity(value, min(low, value), max(high, value))

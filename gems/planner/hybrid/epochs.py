"""Epochs to a target as a function of the global batch: a table, or the gradient noise scale.

Both have `epochs(global_batch)`, and `drawn` for one draw from what is uncertain.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from gems.errors import ConfigError
from gems.planner.hybrid.quantity import Quantity

# A law is trusted so many times beyond the batches that it was fitted to.
MAX_BEYOND = 4.0


class Epochs(Protocol):
    """How many passes over the data training takes to its target, by samples of one optimizer step."""

    def epochs(self, global_batch: float) -> float:
        """Return the epochs; raises ConfigError where they are not known."""

    def is_extrapolated(self, global_batch: float) -> bool:
        """Return whether the figure stands on a law beyond what was measured."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is uncertain."""

    def drawn(self, rng: np.random.Generator) -> Epochs:
        """Return one draw from what is uncertain."""


@dataclass(frozen=True, slots=True)
class EpochTable:
    """Epochs at some global batches; between two of them, their logarithm is linear in that of the batch.

    Attributes:
        global_batches: samples of a step, rising.
        numbers: the epochs at each.
        beyond: goes on along the line of the last two points (or the first two) outside of the table; without it, what
            lies outside is refused.
    """

    global_batches: tuple[float, ...]
    numbers: tuple[Quantity, ...]
    beyond: bool = False

    def __post_init__(self) -> None:
        batches = self.global_batches
        if len(batches) != len(self.numbers) or len(batches) < 1:
            raise ValueError("must have at least one row, and a number of epochs for each global batch")
        if any(not 0 < batch < math.inf for batch in batches):
            raise ValueError("must have global batches above 0")
        if any(low >= high for low, high in pairwise(batches)):
            raise ValueError("must have each global batch once, in rising order")

    @classmethod
    def of(cls, rows: Mapping[float, float | Quantity], beyond: bool = False) -> EpochTable:
        """Build a table from epochs by global batch, in any order."""
        batches = tuple(sorted(rows))
        numbers = (rows[batch] for batch in batches)
        return cls(
            batches, tuple(each if isinstance(each, Quantity) else Quantity.exact(each) for each in numbers), beyond
        )

    def epochs(self, global_batch: float) -> float:
        """Return the epochs at a global batch.

        Raises:
            ConfigError: a batch outside of the table, unless `beyond`.
        """
        batches = self.global_batches
        if self.is_extrapolated(global_batch) and not self.beyond:
            raise ConfigError(
                "global batch", f"{global_batch:g}",
                f"epochs are known from {batches[0]:g} to {batches[-1]:g} samples a step",
                "measure more, or let the file of --epochs say beyond: true, or model: noise_scale",
            )  # fmt: skip
        if len(batches) == 1:
            return self.numbers[0].value
        right = min(max(bisect_right(batches, global_batch), 1), len(batches) - 1)
        low, high = batches[right - 1], batches[right]
        first, last = self.numbers[right - 1].value, self.numbers[right].value
        share = math.log(global_batch / low) / math.log(high / low)
        return float(first * (last / first) ** share)

    def is_extrapolated(self, global_batch: float) -> bool:
        """Return whether a batch lies outside of the table."""
        return not self.global_batches[0] <= global_batch <= self.global_batches[-1]

    @property
    def is_exact(self) -> bool:
        """Whether no row has an interval."""
        return all(number.is_exact for number in self.numbers)

    def drawn(self, rng: np.random.Generator) -> EpochTable:
        """Return a table with each row drawn from its interval, independently."""
        return EpochTable(self.global_batches, tuple(each.drawn(rng) for each in self.numbers), self.beyond)


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The law E(B) = E_min (1 + B / B_crit) of the gradient noise scale (McCandlish et al. 2018, section 2.3).

    Attributes:
        least_epochs: E_min, what small batches take.
        critical_batch: B_crit in samples, at which a step's batch costs twice the epochs.
        correlation: of the logarithms of the two, from -1 to 1.
        measured: the smallest and the largest batch that the law was fitted to; None where it was given.
    """

    least_epochs: Quantity
    critical_batch: Quantity
    correlation: float = 0.0
    measured: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not -1.0 <= self.correlation <= 1.0:
            raise ValueError("must have a correlation from -1 to 1")

    def epochs(self, global_batch: float) -> float:
        """Return the epochs at a global batch in samples."""
        return self.least_epochs.value * (1.0 + global_batch / self.critical_batch.value)

    def is_extrapolated(self, global_batch: float) -> bool:
        """Return whether a batch lies more than four times outside of those that the law was fitted to."""
        if self.measured is None:
            return False
        least, most = self.measured
        return not least / MAX_BEYOND <= global_batch <= most * MAX_BEYOND

    @property
    def is_exact(self) -> bool:
        """Whether neither figure has an interval."""
        return self.least_epochs.is_exact and self.critical_batch.is_exact

    def drawn(self, rng: np.random.Generator) -> NoiseScale:
        """Return a law with both figures drawn together, correlated as they are."""
        one, other = (float(each) for each in rng.standard_normal(2))
        mixed = self.correlation * one + math.sqrt(1.0 - self.correlation**2) * other
        return NoiseScale(
            Quantity.exact(self.least_epochs.at(one)),
            Quantity.exact(self.critical_batch.at(mixed)),
            measured=self.measured,
        )


@dataclass(frozen=True, slots=True)
class EqualEpochs:
    """The same epochs whatever the batch: where nothing is known of them, times of an epoch are compared."""

    number: float = 1.0

    def epochs(self, global_batch: float) -> float:
        """Return the number."""
        return self.number

    def is_extrapolated(self, global_batch: float) -> bool:
        """Report no: nothing was measured."""
        return False

    @property
    def is_exact(self) -> bool:
        """Whether nothing is uncertain, as far as is known."""
        return True

    def drawn(self, rng: np.random.Generator) -> EqualEpochs:
        """Return itself."""
        return self

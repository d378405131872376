"""Epochs to a target as a function of the global batch: a table, or the gradient noise scale."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.special import stdtrit

from gems.errors import ConfigError
from gems.search.hybrid.quantity import SHARES, Quantity

MAX_BEYOND = 4.0  # factor beyond the fitted batches up to which a law is trusted
NUM_ROUNDS = 8
MAX_FACTOR = 1e6  # largest half-width of an interval, so that products stay finite


@dataclass(frozen=True, slots=True)
class EpochTable:
    """Epochs at some global batches, interpolated linearly on logarithmic axes.

    Attributes:
        global_batches: samples of a step, rising.
        numbers: the epochs at each.
        beyond: whether to extrapolate from the last two (or first two) points; if False, batches
            outside of the table are refused.
    """

    global_batches: tuple[float, ...]
    numbers: tuple[Quantity, ...]
    beyond: bool = False

    def __post_init__(self) -> None:
        batches = self.global_batches
        if len(batches) != len(self.numbers) or len(batches) < 1:
            raise ValueError(
                "must have at least one row, and a number of epochs for each global batch"
            )
        if any(not 0 < batch < math.inf for batch in batches):
            raise ValueError("must have global batches above 0")
        if any(low >= high for low, high in pairwise(batches)):
            raise ValueError("must have each global batch once, in rising order")

    @classmethod
    def of(cls, rows: Mapping[float, float | Quantity], beyond: bool = False) -> EpochTable:
        """Build a table from epochs by global batch, in any order."""
        numbers = (
            number if isinstance(number, Quantity) else Quantity.exact(number)
            for _, number in sorted(rows.items())
        )
        return cls(tuple(sorted(rows)), tuple(numbers), beyond)

    def epochs(self, global_batch: float) -> float:
        """Return the epochs at a global batch.

        Raises:
            ConfigError: the batch is outside of the table, and `beyond` is False.
        """
        batches = self.global_batches
        if self.is_extrapolated(global_batch) and not self.beyond:
            raise ConfigError(
                "global batch",
                f"{global_batch:g}",
                f"epochs are known from {batches[0]:g} to {batches[-1]:g} samples a step",
                "measure more, or let the file of --epochs say beyond: true, or model: noise_scale",
            )
        if len(batches) == 1:
            return self.numbers[0].value
        right = min(max(bisect_right(batches, global_batch), 1), len(batches) - 1)
        low = batches[right - 1]
        high = batches[right]
        first = self.numbers[right - 1].value
        last = self.numbers[right].value
        share = math.log(global_batch / low) / math.log(high / low)
        return float(first * (last / first) ** share)

    def is_extrapolated(self, global_batch: float) -> bool:
        """Return whether a batch lies outside of the table."""
        return not self.global_batches[0] <= global_batch <= self.global_batches[-1]


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The law E(B) = E_min (1 + B / B_crit) of the gradient noise scale.

    Source: McCandlish et al. 2018, section 2.3.

    Attributes:
        least_epochs: E_min, the epochs of small batches.
        critical_batch: B_crit, the samples of a batch that takes twice as many epochs.
        correlation: of the logarithms of the two, from -1 to 1.
        measured: the smallest and the largest batch of the fit; None for a law that is given.
    """

    least_epochs: Quantity
    critical_batch: Quantity
    correlation: float = 0.0
    measured: tuple[float, float] | None = None

    def epochs(self, global_batch: float) -> float:
        """Return the epochs at a global batch in samples."""
        return self.least_epochs.value * (1.0 + global_batch / self.critical_batch.value)

    def is_extrapolated(self, global_batch: float) -> bool:
        """Return whether a batch is more than four times outside of the fitted range."""
        if self.measured is None:
            return False
        least, most = self.measured
        return not least / MAX_BEYOND <= global_batch <= most * MAX_BEYOND

    def drawn(self, rng: np.random.Generator) -> NoiseScale:
        """Draw both quantities together, with their correlation."""
        first, second = (float(deviate) for deviate in rng.standard_normal(2))
        mixed = self.correlation * first + math.sqrt(1.0 - self.correlation**2) * second
        least = Quantity.exact(self.least_epochs.at(first))
        critical = Quantity.exact(self.critical_batch.at(mixed))
        return replace(self, least_epochs=least, critical_batch=critical)


Epochs = EpochTable | NoiseScale
# one epoch for any batch, which compares the times of an epoch if nothing else is known
EQUAL_EPOCHS = NoiseScale(Quantity.exact(1.0), Quantity.exact(1e300))


@dataclass(frozen=True, slots=True)
class NoiseFit:
    """A fitted law, its (global batch, epochs) runs, and their residuals, measured / fitted - 1."""

    law: NoiseScale
    runs: tuple[tuple[float, float], ...]
    residuals: tuple[float, ...]


def fit_noise_scale(runs: Sequence[tuple[float, float]]) -> NoiseFit:
    """Fit E(B) = E_min (1 + B / B_crit), a line in B, to (global batch, epochs to the target) runs.

    Source: McCandlish et al. 2018, section 2.3, and the appendix on fits. Runs scatter in
    proportion to their epochs, so each is weighted by the inverse square of its fitted epochs, in a
    few rounds. The 95 % intervals are those of Student's t for the logarithms of E_min and B_crit,
    which are correlated; two runs alone give exact values.

    Raises:
        ConfigError: there are fewer than two global batches, or epochs do not grow with the batch.
    """
    batches, epochs = np.array(runs, dtype=float).reshape(-1, 2).T
    if len(set(batches.tolist())) < 2:
        raise ConfigError("epochs", f"{len(runs)} runs", "must be of two global batches or more")
    scale = float(batches.max())
    design = np.column_stack([np.ones_like(batches), batches / scale])
    fitted = epochs
    for _ in range(NUM_ROUNDS):
        normal = design.T @ (design / fitted[:, None] ** 2)
        line = np.linalg.solve(normal, design.T @ (epochs / fitted**2))
        least, slope = (float(coefficient) for coefficient in line)
        if least <= 0.0 or slope <= 0.0:
            why = "they do not grow with the batch" if slope <= 0.0 else "they grow faster than it"
            raise ConfigError(
                "epochs",
                " ".join(f"{batch:g}:{number:g}" for batch, number in runs),
                f"have no noise scale: {why}",
                "use the table (model: table), or measure more batches and repetitions",
            )
        fitted = design @ line
    critical = scale * least / slope
    residuals = epochs / fitted - 1.0
    freedom = len(runs) - 2
    reaches = np.zeros(2)
    correlation = 0.0
    if freedom:
        covariance = np.linalg.inv(normal) * float(residuals @ residuals) / freedom
        # error propagation: d ln E_min = d least / least, d ln B_crit = d ln E_min - d ln slope
        change = np.array([[1.0 / least, 0.0], [1.0 / least, -1.0 / slope]])
        of_logs = change @ covariance @ change.T
        deviations = np.sqrt(np.maximum(np.diag(of_logs), 0.0))
        product = float(deviations[0] * deviations[1])
        correlation = float(np.clip(of_logs[0, 1] / product, -1.0, 1.0)) if product else 0.0
        reaches = float(stdtrit(freedom, SHARES[1])) * deviations
    factors = np.exp(np.minimum(reaches, math.log(MAX_FACTOR))).tolist()
    e_min, b_crit = (
        Quantity(value, value / factor, value * factor)
        for value, factor in zip((least, critical), factors, strict=True)
    )
    law = NoiseScale(e_min, b_crit, correlation, (float(batches.min()), scale))
    return NoiseFit(law, tuple(runs), tuple(residuals.tolist()))

"""The gradient noise scale fitted to a few runs: least squares with weights, intervals and residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from gems.errors import ConfigError
from gems.planner.hybrid.epochs import NoiseScale
from gems.planner.hybrid.quantity import SHARES, Quantity

NUM_ROUNDS = 8
# An interval is not wider than this factor: beyond, nothing is known, and products of it stay finite.
MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class EpochRun:
    """One training: samples of its steps, and the epochs that it took to the target."""

    global_batch: float
    epochs: float


@dataclass(frozen=True, slots=True)
class NoiseFit:
    """A fitted law, with the relative residual of each run: measured over fitted epochs, less 1."""

    law: NoiseScale
    runs: tuple[EpochRun, ...]
    residuals: tuple[float, ...]


def fit_noise_scale(runs: Sequence[EpochRun]) -> NoiseFit:
    """Fit E(B) = E_min (1 + B / B_crit), a line in B (McCandlish et al. 2018, section 2.3, and its appendix on fits).

    Runs scatter in proportion to their epochs, so that each weighs with the inverse square of what is fitted for it, in
    a few rounds. The 95 % intervals are of Student's t on the runs beyond two, taken on the logarithms of the two
    figures, whose correlation is kept; two runs alone give none.

    Raises:
        ConfigError: fewer than two global batches, or epochs that do not grow with the batch.
    """
    batches = np.array([run.global_batch for run in runs], dtype=float)
    found = np.array([run.epochs for run in runs], dtype=float)
    if len(set(batches.tolist())) < 2:
        raise ConfigError("epochs", f"{len(runs)} runs", "must be of two global batches or more")
    scale = float(batches.max())
    design = np.column_stack([np.ones_like(batches), batches / scale])
    fitted = found
    for _ in range(NUM_ROUNDS):
        normal = design.T @ (design / fitted[:, None] ** 2)
        line = np.linalg.solve(normal, design.T @ (found / fitted**2))
        least, slope = (float(each) for each in line)
        if least <= 0.0 or slope <= 0.0:
            raise ConfigError(
                "epochs", " ".join(f"{run.global_batch:g}:{run.epochs:g}" for run in runs),
                "have no noise scale: "
                + ("they do not grow with the batch" if slope <= 0.0 else "they grow faster than it"),
                "use the table (model: table), or measure more batches and repetitions",
            )  # fmt: skip
        fitted = design @ line
    critical = scale * least / slope
    residuals = found / fitted - 1.0
    freedom = len(runs) - 2
    span = (float(batches.min()), scale)
    if freedom == 0:
        law = NoiseScale(Quantity.exact(least), Quantity.exact(critical), measured=span)
        return NoiseFit(law, tuple(runs), tuple(residuals.tolist()))
    covariance = np.linalg.inv(normal) * float(residuals @ residuals) / freedom
    # By small changes: ln E_min has d least / least, and ln B_crit has d least / least - d slope / slope.
    change = np.array([[1.0 / least, 0.0], [1.0 / least, -1.0 / slope]])
    of_logs = change @ covariance @ change.T
    reach = float(stdtrit(freedom, SHARES[1]))
    deviations = np.sqrt(np.maximum(np.diag(of_logs), 0.0))
    product = float(deviations[0] * deviations[1])
    correlation = float(np.clip(of_logs[0, 1] / product, -1.0, 1.0)) if product else 0.0
    law = NoiseScale(
        _interval(least, reach * float(deviations[0])), _interval(critical, reach * float(deviations[1])),
        correlation, span,
    )  # fmt: skip
    return NoiseFit(law, tuple(runs), tuple(residuals.tolist()))


def _interval(value: float, reach: float) -> Quantity:
    factor = math.exp(min(reach, math.log(MAX_FACTOR)))
    return Quantity(value, value / factor, value * factor)

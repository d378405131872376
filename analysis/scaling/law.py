"""The law of scaling: a step takes `a + b x samples a rank + c x log2(ranks)` seconds, with no coefficient below 0.

A fixed part, the computation, and sums over a tree of ranks: so ranks and samples a rank may change
independently, as they do in most published series. Few rows cannot tell the three parts, so two
have a weak normal prior: of a step at the first row 5 % +- 10 % are fixed, and a doubling of the
ranks adds 2 % +- 2 %. Errors are relative: 1 % counts as much on 4 ranks as on 1024.

How far a forecast may be off is measured, from a rolling origin (Tashman, International Journal of
Forecasting 16, 2000): fitted to the rows up to some number of ranks, what did the law say of those
up to four times as many? Few forecasts are pooled with a prior error. docs/benchmarks/outside.md
has the errors on published series, and those of the laws that this one replaced. The priors are
from `scripts/data/mlperf_scaling.csv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.metrics.statistics import Interval

FORMULA = (
    "step = fixed_s + s_per_sample x samples a rank + s_per_doubling x log2(ranks / first ranks)"
)
MAX_RATIO = 4.0  # of the ranks asked for over those fitted to, up to which the law is judged
WIDEST = 0.4  # the largest relative half-width of a usable interval
PRIORS = ((0, 0.05, 0.1), (2, 0.02, 0.02))  # column, mean and standard deviation
NOISE = 0.01  # of a step time
PRIOR_ERROR = 0.12
PRIOR_FORECASTS = 4.0
Z95 = 2.0  # standard deviations of a 95 % interval
LEAST = 0.01  # of the first step


@dataclass(frozen=True, slots=True)
class Row:
    """A step on some accelerators; `where` says where it was published."""

    accelerators: int
    global_batch: float
    step_s: float
    where: str = ""

    @property
    def samples(self) -> float:
        """Samples a rank."""
        return self.global_batch / self.accelerators


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """The law fitted to rows.

    Attributes:
        rows: those fitted to, by accelerators.
        coefficients: fixed part, part by samples and part by doublings, of the first row's step.
        covariance: what the rows leave open of them.
        deviation: standard deviation of the logarithm of a forecast of up to four times the ranks
            over the truth.
        num_forecasts: how many it was measured by.
    """

    rows: tuple[Row, ...]
    coefficients: np.ndarray
    covariance: np.ndarray
    deviation: float
    num_forecasts: int

    @property
    def last_ranks(self) -> int:
        """Ranks of the largest row: beyond them the law extrapolates."""
        return self.rows[-1].accelerators

    @property
    def limit_ranks(self) -> int:
        """The most ranks up to which the law is judged."""
        return int(MAX_RATIO * self.last_ranks)

    @property
    def parameters(self) -> dict[str, float]:
        """The coefficients in seconds, by their names in the formula."""
        first = self.rows[0]
        sizes = (first.step_s, first.step_s / first.samples, first.step_s)
        names = ("fixed_s", "s_per_sample", "s_per_doubling")
        return {
            name: float(c * size)
            for name, c, size in zip(names, self.coefficients, sizes, strict=True)
        }

    def step_s(self, accelerators: float, samples: float) -> Interval:
        """Return a step with its 95 % interval, the wider the farther beyond four times the ranks fitted to."""
        first = self.rows[0]
        terms = _terms(accelerators, samples, first)
        value = max(float(terms @ self.coefficients), LEAST)
        beyond = max(1.0, math.log(accelerators / self.last_ranks, MAX_RATIO))
        variance = (beyond * self.deviation) ** 2 + float(
            terms @ self.covariance @ terms
        ) / value**2
        factor = math.exp(min(Z95 * math.sqrt(variance), 100.0))
        step_s = value * first.step_s
        return Interval(step_s / factor, step_s, step_s * factor)

    def is_reliable(self, accelerators: float, samples: float) -> bool:
        """Return whether a forecast is within four times the ranks fitted to, and narrow."""
        step = self.step_s(accelerators, samples)
        return accelerators <= self.limit_ranks and step.high <= (1.0 + WIDEST) * step.value


def fit_law(rows: Sequence[Row]) -> Law:
    """Fit the law, and measure by forecasts among the rows how far off it is."""
    ordered = tuple(sorted(rows, key=lambda row: (row.accelerators, row.global_batch)))
    errors = []
    for origin in sorted({row.accelerators for row in ordered})[:-1]:
        seen = [row for row in ordered if row.accelerators <= origin]
        coefficients, _ = _solve(seen)
        for row in ordered:
            if origin < row.accelerators <= MAX_RATIO * origin:
                value = max(
                    float(_terms(row.accelerators, row.samples, seen[0]) @ coefficients), LEAST
                )
                errors.append(math.log(value * seen[0].step_s / row.step_s))
    squares = sum(error**2 for error in errors) + PRIOR_FORECASTS * PRIOR_ERROR**2
    deviation = math.sqrt(squares / (len(errors) + PRIOR_FORECASTS))
    return Law(ordered, *_solve(ordered), deviation, len(errors))


def _terms(accelerators: float, samples: float, first: Row) -> np.ndarray:
    return np.array([1.0, samples / first.samples, math.log2(accelerators / first.accelerators)])


def _solve(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients and covariance.

    Least squares of relative errors, with the priors as further rows.
    """
    from scipy.optimize import nnls

    first = rows[0]
    terms = np.array([_terms(row.accelerators, row.samples, first) for row in rows])
    design = terms / np.array([[row.step_s / first.step_s] for row in rows])
    targets = np.ones(len(rows))
    for column, mean, deviation in PRIORS:
        design = np.vstack([design, np.eye(3)[column] * NOISE / deviation])
        targets = np.append(targets, mean * NOISE / deviation)
    coefficients, _ = nnls(design, targets)
    return coefficients, NOISE**2 * np.linalg.inv(design.T @ design)

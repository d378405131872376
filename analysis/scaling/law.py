"""The law of scaling: a step takes `a + b x samples per rank + c x log2(ranks)` seconds.

Beside it stands the last row, scaled by (samples a rank)^0.8, which needs no fit. A forecast is the
weighted geometric mean of both (Bates and Granger, Operational Research Quarterly 20, 1969), each
weighted by the inverse square of its mean squared error from a rolling origin, so either wins where
it has won.

No coefficient is below 0. The parts are a fixed part, the computation, and sums over a tree of
ranks, so ranks and samples per rank may change independently, as they do in most published series.
A few rows cannot separate the three parts, so two of them have a weak normal prior: 5 % +- 10 % of
a step at the first row are fixed, and a doubling of the ranks adds 2 % +- 2 %. Errors are relative:
1 % counts as much on 4 ranks as on 1024.

The error of a forecast is measured from a rolling origin (Tashman, International Journal of
Forecasting 16, 2000): the law is fitted to the rows up to some number of ranks, and compared with
the rows of up to four times as many. A few forecasts are pooled with a prior error.
docs/benchmarks/outside.md has the errors on published series, and those of the laws that this one
replaced. The priors are from `scripts/data/mlperf_scaling.csv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from analysis.metrics.statistics import Interval

FORMULA = (
    "step = (fixed_s + s_per_sample x samples a rank + s_per_doubling x log2(ranks / first ranks))"
    "^(1 - last_row_share) x (last step x (samples a rank / last samples)^0.8)^last_row_share"
)
# ratio of the requested ranks to the fitted ones, up to which the law is evaluated
MAX_RATIO = 4.0
WIDEST = 0.4  # the largest relative half-width of a usable interval
PRIORS = ((0, 0.05, 0.1), (2, 0.02, 0.02))  # column, mean and standard deviation
NOISE = 0.01  # relative error of a step time
PRIOR_ERROR = 0.12
PRIOR_FORECASTS = 4.0
T95 = 0.975  # quantile of Student's t that bounds a 95 % interval
LEAST = 0.01  # relative to the first step
ELASTICITY = 0.8  # of a step's time by the samples a rank, without a law
RECENT = 0.5  # weight of an error relative to one from the next origin, which has seen more rows
RIVAL_ERRORS = (0.05, 0.07)  # of the law and of the scaled last row, before any comparison


@dataclass(frozen=True, slots=True)
class Row:
    """A step on some accelerators; `where` is the place of its publication."""

    accelerators: int
    global_batch: float
    step_s: float
    where: str = ""

    @property
    def samples(self) -> float:
        """The samples per rank."""
        return self.global_batch / self.accelerators

    @property
    def place(self) -> tuple[int, float]:
        """The accelerators and the samples per rank."""
        return self.accelerators, self.samples


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """The law fitted to rows.

    Attributes:
        rows: The fitted rows, by accelerators.
        coefficients: The fixed part, the part by samples and the part by doublings, relative to the
            first row's step.
        covariance: The remaining uncertainty of the coefficients.
        deviation: The standard deviation of the logarithm of forecast over truth, for up to four
            times the ranks.
        num_forecasts: The number of forecasts from which it was measured.
        last_row_share: The weight of the scaled last row in a forecast, from 0 to 1.
    """

    rows: tuple[Row, ...]
    coefficients: np.ndarray
    covariance: np.ndarray
    deviation: float
    num_forecasts: int
    last_row_share: float

    @property
    def last_ranks(self) -> int:
        """The ranks of the largest row; beyond them the law extrapolates."""
        return self.rows[-1].accelerators

    @property
    def limit_ranks(self) -> int:
        """The largest number of ranks for which the law is evaluated."""
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
        """Return the time of a step with its 95 % interval.

        Beyond four times the fitted ranks, the interval gets wider with the distance.
        """
        terms = _terms(accelerators, samples, self.rows[0])
        value = max(float(terms @ self.coefficients), LEAST)
        beyond = max(1.0, math.log(accelerators / self.last_ranks, MAX_RATIO))
        spread = (1.0 - self.last_row_share) ** 2 * float(terms @ self.covariance @ terms)
        variance = (beyond * self.deviation) ** 2 + spread / value**2
        quantile = student_t(T95, self.num_forecasts + PRIOR_FORECASTS)
        factor = math.exp(min(quantile * math.sqrt(variance), 100.0))
        step_s = _mixed(self.rows, self.coefficients, self.last_row_share, accelerators, samples)
        return Interval(step_s / factor, step_s, step_s * factor)

    def is_reliable(self, accelerators: float, samples: float) -> bool:
        """Return whether a forecast is within four times the fitted ranks, and narrow."""
        step = self.step_s(accelerators, samples)
        return accelerators <= self.limit_ranks and step.high <= (1.0 + WIDEST) * step.value


def fit_law(rows: Sequence[Row]) -> Law:
    """Fit the law, and measure its error by forecasts among the rows."""
    ordered = tuple(sorted(rows, key=lambda row: (row.accelerators, row.global_batch)))
    rivals: list[tuple[float, float]] = []  # squared errors of the law and of the scaled last row
    errors = []
    for origin in sorted({row.accelerators for row in ordered})[:-1]:
        seen = [row for row in ordered if row.accelerators <= origin]
        coefficients, _ = _solve(seen)
        share = _last_row_share(rivals)
        rivals = [(RECENT * law, RECENT * last_row) for law, last_row in rivals]
        for row in ordered:
            if origin < row.accelerators <= MAX_RATIO * origin:
                of_law, of_last_row, of_both = (
                    math.log(_mixed(seen, coefficients, part, *row.place) / row.step_s)
                    for part in (0.0, 1.0, share)
                )
                rivals.append((of_law**2, of_last_row**2))
                errors.append(of_both)
    squares = sum(error**2 for error in errors) + PRIOR_FORECASTS * PRIOR_ERROR**2
    deviation = math.sqrt(squares / (len(errors) + PRIOR_FORECASTS))
    return Law(ordered, *_solve(ordered), deviation, len(errors), _last_row_share(rivals))


@cache
def student_t(share: float, freedom: float) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf(share, freedom))


def scaled_last_row_s(rows: Sequence[Row], samples: float) -> float:
    """Return the step of the last row, scaled by the samples a rank."""
    last = rows[-1]
    return float(last.step_s * (samples / last.samples) ** ELASTICITY)


def _last_row_share(rivals: Sequence[tuple[float, float]]) -> float:
    law, last_row = (
        (prior**2 + sum(squares[place] for squares in rivals)) ** 2
        for place, prior in enumerate(RIVAL_ERRORS)
    )
    return law / (law + last_row)


def _mixed(
    rows: Sequence[Row],
    coefficients: np.ndarray,
    last_row_share: float,
    accelerators: float,
    samples: float,
) -> float:
    """Return the weighted geometric mean of the law and the scaled last row, in seconds."""
    first = rows[0]
    value = max(float(_terms(accelerators, samples, first) @ coefficients), LEAST)
    law_s = value * first.step_s
    return float(
        law_s ** (1.0 - last_row_share) * scaled_last_row_s(rows, samples) ** last_row_share
    )


def _terms(accelerators: float, samples: float, first: Row) -> np.ndarray:
    return np.array([1.0, samples / first.samples, math.log2(accelerators / first.accelerators)])


def _solve(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients and covariance.

    They minimise the squares of relative errors, with the priors as additional rows.
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

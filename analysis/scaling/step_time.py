"""Laws of step time for series in which ranks and samples a rank vary independently, as in most published ones.

`analysis.scaling.laws` fits what an image costs over ranks, which is no function of the ranks alone
once the samples a rank change with them. Here a step's time is a function of both: a fixed part, a
part by samples a rank, and terms by log2 of the ranks, of each level of the network where nodes are
known, or by ranks. Coefficients are never negative.

Few rows cannot tell all terms, so each term has a prior, a normal one: of a step at the first row
10 % +- 9 % are fixed; twice the samples take 2^(.75 +- .07) times as long; twice the ranks 5 % +- 2
% longer. A squared error counts in proportion to the ranks of its row. The priors and the errors of
a forecast maximise the density of the measured steps in `scripts/data/mlperf_scaling.csv`, averaged
over ten resamples of its series; the laws, the limits and how rows are weighted were chosen before,
with `scripts/data/measured_scaling.csv` at hand.

No law is chosen by how well it fits. Each is judged by its forecasts from a rolling origin: fitted
to the rows up to some number of ranks, what did it say of those up to four times as many (Tashman,
International Journal of Forecasting 16, 2000)? The laws' forecasts are averaged, with weights by
the density that each gave to what was measured then. The interval holds each law's own errors, what
its coefficients leave open, and how far the laws are apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.metrics.statistics import Interval

MAX_RATIO = 4.0  # of the ranks asked for over those fitted to, up to which a law is judged
WIDEST = 0.4  # the largest relative half-width of a usable interval
_NOISE = 0.01  # of a published step time, and of a law that holds
# Prior error of a forecast and its weight in forecasts: for comparing laws, and for the interval.
_LAW_ERROR = 0.01
_LAW_ERROR_WEIGHT = 4.0
_ERROR = 0.08
_ERROR_WEIGHT = 7.0
_PENALTY = 0.15  # added for each term to minus twice the log density
_RECENT = 0.5
# of the first step: below it, a sum of terms makes no sense, and its variance becomes large
_LEAST = 0.01
_Z = 2.0  # standard deviations of a 95 % interval
# mean and standard deviation
_FIXED = (0.1, 0.09)
_ELASTICITY = (0.75, 0.07)
_BY_DOUBLING = (0.05, 0.02)
_BY_RANKS = (0.0, 0.0003)


@dataclass(frozen=True, slots=True)
class Row:
    """A measured step: `nodes` is None where it is not known, `where` says where it was published."""

    accelerators: int
    global_batch: int
    step_s: float
    nodes: int | None = None
    where: str = ""

    @property
    def samples(self) -> float:
        """Samples a rank."""
        return self.global_batch / self.accelerators


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a law: its value at a row beside that at the first one, and its prior mean and deviation, if any."""

    name: str
    value: Callable[[Row, Row], float]
    prior: tuple[float, float] | None = None


def _doublings(of: Callable[[Row], float]) -> Callable[[Row, Row], float]:
    return lambda row, first: math.log2(of(row) / of(first))


_INSIDE = Term(
    "log2(ranks of a node)",
    _doublings(lambda row: row.accelerators / (row.nodes or 1)),
    _BY_DOUBLING,
)
_AMONG = Term("log2(nodes)", _doublings(lambda row: row.nodes or 1), _BY_DOUBLING)
_TREE = Term("log2(ranks)", _doublings(lambda row: row.accelerators), _BY_DOUBLING)
_RING = Term("ranks", lambda row, first: row.accelerators / first.accelerators - 1.0, _BY_RANKS)
_SAMPLES = Term("samples a rank", lambda row, first: row.samples / first.samples)
_CONSTANT = Term("1", lambda row, first: 1.0, _FIXED)
_LOG_SAMPLES = Term(
    "log(samples a rank)", lambda row, first: math.log(row.samples / first.samples), _ELASTICITY
)
_LOG_SCALE = Term("log(scale)", lambda row, first: 1.0)


@dataclass(frozen=True, slots=True)
class StepLaw:
    """A law of a step's time: a sum of terms, or with `is_product` a product, that is a sum of logarithms."""

    name: str
    formula: str
    terms: tuple[Term, ...]
    is_product: bool = False


def step_laws(rows: Sequence[Row]) -> tuple[StepLaw, ...]:
    """Return the laws for some rows.

    Where all of them know their nodes, the network has two levels.
    """
    levels = (_INSIDE, _AMONG) if all(row.nodes for row in rows) else (_TREE,)
    growth = " + ".join(f"c {term.name}" for term in levels)
    return (
        StepLaw("power", "a samples^e", (_LOG_SCALE, _LOG_SAMPLES), is_product=True),
        StepLaw(
            "power_tree",
            f"a samples^e exp({growth})",
            (_LOG_SCALE, _LOG_SAMPLES, *levels),
            is_product=True,
        ),
        StepLaw("fixed", "a + b samples", (_CONSTANT, _SAMPLES)),
        StepLaw("tree", f"a + b samples + {growth}", (_CONSTANT, _SAMPLES, *levels)),
        StepLaw("ring", "a + b samples + c ranks", (_CONSTANT, _SAMPLES, _RING)),
    )


@dataclass(frozen=True, slots=True)
class StepFit:
    """A law fitted to rows, of which `first` is the smallest; step times are relative to its own."""

    law: StepLaw
    first: Row
    coefficients: np.ndarray
    covariance: np.ndarray

    def forecast(self, row: Row) -> tuple[float, float]:
        """Return the logarithm of the step's time in seconds, and the variance that the coefficients leave to it."""
        values = np.array([term.value(row, self.first) for term in self.law.terms])
        found = float(values @ self.coefficients)
        variance = float(values @ self.covariance @ values)
        if self.law.is_product:
            return found + math.log(self.first.step_s), variance
        found = max(found, _LEAST)
        return math.log(found * self.first.step_s), variance / found**2


def fit_step_law(law: StepLaw, rows: Sequence[Row]) -> StepFit:
    """Fit a law to rows by weighted least squares of relative errors, with the priors of its terms as further rows."""
    from scipy.optimize import lsq_linear

    first = rows[0]
    last = rows[-1]
    values = np.array([[term.value(row, first) for term in law.terms] for row in rows])
    times = np.array([row.step_s / first.step_s for row in rows])
    weights = np.array([(row.accelerators / last.accelerators) ** _RECENT for row in rows])
    targets = np.log(times) if law.is_product else np.ones(len(rows))
    design = values if law.is_product else values / times[:, None]
    design = design * weights[:, None]
    targets = targets * weights
    for place, term in enumerate(law.terms):
        if term.prior is not None:
            mean, deviation = term.prior
            design = np.vstack([design, np.eye(len(law.terms))[place] * _NOISE / deviation])
            targets = np.append(targets, mean * _NOISE / deviation)
    low = np.array([-np.inf if term is _LOG_SCALE else 0.0 for term in law.terms])
    high = np.array([1.0 if term is _LOG_SAMPLES else np.inf for term in law.terms])
    found = lsq_linear(design, targets, bounds=(low, high), method="bvls").x
    return StepFit(law, first, found, _NOISE**2 * np.linalg.inv(design.T @ design))


@dataclass(frozen=True, slots=True)
class StepModel:
    """Laws fitted to rows, with their weights, and the variances of their forecasts beside those of coefficients."""

    fits: tuple[StepFit, ...]
    weights: np.ndarray = field(repr=False)
    variances: np.ndarray = field(repr=False)
    num_forecasts: int
    last_ranks: int

    @property
    def best(self) -> StepFit:
        """The fit whose law has the most weight."""
        return self.fits[int(np.argmax(self.weights))]

    def step_s(self, row: Row) -> Interval:
        """Return the step's time with its 95 % interval, the wider the farther beyond four times the ranks fitted to.

        Of `row` the step's time is not read.
        """
        log_s, deviation = self._forecast(row)
        middle = math.exp(log_s)
        return Interval(
            max(0.0, middle * (1.0 - _Z * deviation)), middle, middle * (1.0 + _Z * deviation)
        )

    def is_narrow(self, row: Row) -> bool:
        """Return whether the interval is at most WIDEST to either side."""
        return _Z * self._forecast(row)[1] <= WIDEST

    def disagreement(self, row: Row) -> float:
        """Return how far the laws are apart at a row, as a standard deviation of logarithms.

        What it would decide.
        """
        found = np.array([fit.forecast(row)[0] for fit in self.fits])
        return float(np.sqrt(self.weights @ (found - self.weights @ found) ** 2))

    def _forecast(self, row: Row) -> tuple[float, float]:
        found = np.array([fit.forecast(row) for fit in self.fits])
        middle = float(self.weights @ found[:, 0])
        variance = float(
            self.weights @ (self.variances + found[:, 1] + (found[:, 0] - middle) ** 2)
        )
        beyond = max(1.0, math.log(row.accelerators / self.last_ranks, MAX_RATIO))
        return middle, math.sqrt(variance) * beyond


def fit_steps(rows: Sequence[Row]) -> StepModel:
    """Fit all laws to rows, and weight them by how well they would have foreseen the larger ones from the smaller."""
    ordered = sorted(rows, key=lambda row: (row.accelerators, row.global_batch))
    fits = []
    scores = []
    variances = []
    num_forecasts = 0
    for law in step_laws(ordered):
        seen = np.array(_forecast_errors(law, ordered)).reshape(-1, 3)
        errors, known, weights = seen.T
        total = float(weights.sum())
        excess = float(weights @ np.maximum(0.0, errors**2 - known))
        compared = known + (excess + _LAW_ERROR_WEIGHT * _LAW_ERROR**2) / (
            total + _LAW_ERROR_WEIGHT
        )
        density = float(weights @ (np.log(compared) + errors**2 / compared))
        fits.append(fit_step_law(law, ordered))
        scores.append(density + _PENALTY * len(law.terms))
        variances.append((excess + _ERROR_WEIGHT * _ERROR**2) / (total + _ERROR_WEIGHT))
        num_forecasts = len(seen)
    shares = np.exp(-(np.array(scores) - min(scores)) / 2.0)
    return StepModel(
        tuple(fits),
        shares / shares.sum(),
        np.array(variances),
        num_forecasts,
        ordered[-1].accelerators,
    )


def _forecast_errors(law: StepLaw, rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """Return the errors of forecasts from each origin, with the variance that was known of, and a weight by ranks."""
    found = []
    for origin in sorted({row.accelerators for row in rows})[:-1]:
        fit = fit_step_law(law, [row for row in rows if row.accelerators <= origin])
        for row in rows:
            if origin < row.accelerators <= MAX_RATIO * origin:
                log_s, variance = fit.forecast(row)
                weight = row.accelerators / rows[-1].accelerators
                found.append((log_s - math.log(row.step_s), variance, weight))
    return found


def next_row(model: StepModel, rows: Sequence[Row]) -> Row:
    """Return the row to measure next.

    On at most twice the ranks, where the laws are farthest apart.
    """
    last = max(rows, key=lambda row: row.accelerators)
    candidates = [
        Row(ranks, max(1, round(last.samples * factor)) * ranks, 0.0, _nodes_of(last, ranks))
        for ranks in (last.accelerators, 2 * last.accelerators)
        for factor in (0.25, 0.5, 1.0, 2.0)
    ]
    measured = {(row.accelerators, row.global_batch) for row in rows}
    fresh = [row for row in candidates if (row.accelerators, row.global_batch) not in measured]
    return max(fresh, key=model.disagreement)


def _nodes_of(row: Row, ranks: int) -> int | None:
    return None if row.nodes is None else max(1, round(row.nodes * ranks / row.accelerators))

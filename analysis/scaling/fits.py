"""Laws of scaling fitted to the lines of a study.

Parameters with intervals, residuals, errors, and range of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from analysis.metrics.statistics import Interval, median_draws, percentile_interval
from analysis.scaling.laws import LAWS, Law
from analysis.scaling.points import Point, base_points, scaling_kind
from gems.errors import ConfigError, one_of
from gems.trace import SOURCES
from gems.utils.units import number

MAX_EXTRAPOLATION = 4
MIN_POINTS = 3
NUM_DRAWS = 1000
NUM_CURVE_POINTS = 41
CHOICES = (*LAWS, "all", "none")
_FLOOR = 1e-4
_HANDICAP = 1.1
_MAX_LOG = 2.0  # of a resampled deviation: beyond it a law is meaningless, and exp() would overflow


@dataclass(frozen=True, slots=True)
class Series:
    """What an image costs over ranks. A prediction is never mixed with what ran.

    Attributes:
        ranks: shape (num_points,), rising.
        rank_s_per_image: what an image of the base costs, in seconds of one rank, shape
            (num_points,).
        deviations: how far the medians of resampled steps lie from the medians, as logarithms of
            their ratio; shape (num_draws, num_points), 0 where steps are all alike.
    """

    line: str
    source: str
    ranks: np.ndarray
    rank_s_per_image: np.ndarray
    deviations: np.ndarray

    @property
    def num_ranks(self) -> int:
        """How many different numbers of ranks there are."""
        return len(np.unique(self.ranks))


@dataclass(frozen=True, slots=True)
class Residual:
    """A point beside the law; `relative` is fitted over observed, less 1."""

    ranks: int
    rank_s_per_image: float
    fitted_rank_s_per_image: float
    relative: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A law with its parameters; evaluate it by `cost_s` or `curve`.

    Attributes:
        formula: of what an image costs in seconds of one rank.
        parameters: with 95 % bootstrap intervals, over steps and over the law's residuals.
        residuals: one a point.
        r2: 1 - squares of relative residuals over those of the best constant; None if nothing
            changes.
        error: mean over the points of the relative error of the law that was fitted without the
            point.
        num_fitted: degrees of freedom that the fit used.
        coefficients: of the law, shape (1, num_coefficients).
        draws: the same of resamples, shape (num_draws, num_coefficients).
    """

    line: str
    source: str
    law: str
    formula: str
    parameters: Mapping[str, Interval]
    residuals: tuple[Residual, ...]
    r2: float | None
    error: float
    num_fitted: int
    coefficients: np.ndarray = field(repr=False, compare=False)
    draws: np.ndarray = field(repr=False, compare=False)

    @property
    def first_ranks(self) -> int:
        """Ranks of the smallest point: below them the law is not valid."""
        return self.residuals[0].ranks

    @property
    def last_ranks(self) -> int:
        """Ranks of the largest point: beyond them the law extrapolates."""
        return self.residuals[-1].ranks

    @property
    def limit_ranks(self) -> int:
        """The most ranks to which the law extrapolates."""
        return MAX_EXTRAPOLATION * self.last_ranks

    def cost_s(self, ranks: float) -> Interval:
        """Return what an image of the base costs on `ranks` ranks, in seconds of one rank, with its 95 % interval.

        Raises:
            ConfigError: fewer ranks than the smallest point has, or more than four times those of
            the largest.
        """
        low, value, high = self.curve([ranks])[:, 0]
        return Interval(float(low), float(value), float(high))

    def curve(self, ranks: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the same over many ranks, as `cost_s`.

        Rows low, value and high, shape (3, num_ranks).
        """
        asked = np.asarray(ranks, dtype=float)
        refused = asked[(asked < self.first_ranks) | (asked > self.limit_ranks)]
        if len(refused):
            fitted = f"{self.law} was fitted to {self.first_ranks} to {self.last_ranks} ranks"
            advice = f"{fitted} and is not valid beyond {MAX_EXTRAPOLATION} times that"
            allowed = f"allowed: {self.first_ranks} to {self.limit_ranks}"
            raise ConfigError("ranks", f"{refused[0]:g}", allowed, advice)
        law = LAWS[self.law]
        value = law.predict(self.coefficients, asked)[0]
        low, high = np.percentile(law.predict(self.draws, asked), [2.5, 97.5], axis=0)
        return np.stack([np.minimum(low, value), value, np.maximum(high, value)])


def make_series(points: Sequence[Point]) -> list[Series]:
    """Return a series for each line that has three numbers of ranks of one source, of the most real such source.

    A comparison and a study in which images and ranks change apart have none: there what an image
    costs is no function of the ranks. Points whose work cannot be compared with that of the base
    are left out.
    """
    if scaling_kind(points) in ("comparison", "mixed"):
        return []
    found = []
    for line, base in sorted(base_points(points).items()):
        by_source = (_series(line, source, base, points) for source in SOURCES)
        found += [series for series in by_source if series.num_ranks >= MIN_POINTS][:1]
    return found


def _series(line: str, source: str, base: Point, points: Sequence[Point]) -> Series:
    shares = {
        point: share
        for point in sorted(points, key=lambda point: point.ranks)
        if (point.line, point.source) == (line, source)
        and (share := point.work_beside(base)) is not None
    }
    deviations = np.zeros((NUM_DRAWS, len(shares)))
    for place, point in enumerate(shares):
        if min(point.step_s) < max(point.step_s):
            deviations[:, place] = np.log(
                median_draws(point.step_s, NUM_DRAWS, seed=place) / point.step_median_s
            )
    costs_s = np.array([point.rank_s_per_image / share for point, share in shares.items()])
    return Series(
        line, source, np.array([point.ranks for point in shares], dtype=float), costs_s, deviations
    )


def fit_law(law: Law, series: Series, seed: int = 0) -> Fit:
    """Fit a law to a series.

    Raises:
        ConfigError: the series has fewer numbers of ranks than the law needs.
    """
    if series.num_ranks < law.min_points:
        raise ConfigError(
            "fit", law.name, too_few(law, series.num_ranks), "add points to the study"
        )
    ranks = series.ranks
    costs_s = series.rank_s_per_image
    coefficients = law.solve(ranks, 1.0 / costs_s, costs_s[None])
    fitted_s = law.predict(coefficients, ranks)[0]
    num_fitted = law.num_fitted(coefficients[0])
    draws = law.solve(ranks, 1.0 / costs_s, _resampled(series, fitted_s, num_fitted, seed))
    named = law.parameters(np.concatenate([coefficients, draws]))
    inverse = 1.0 / costs_s
    constant = inverse.sum() / (inverse**2).sum()
    unfitted, missed = (float(((1.0 - fit * inverse) ** 2).sum()) for fit in (constant, fitted_s))
    return Fit(
        line=series.line,
        source=series.source,
        law=law.name,
        formula=law.formula,
        parameters={
            name: percentile_interval(values[1:], float(values[0]))
            for name, values in named.items()
        },
        residuals=tuple(
            Residual(int(count), float(cost_s), float(on_law_s), float(on_law_s / cost_s - 1.0))
            for count, cost_s, on_law_s in zip(ranks, costs_s, fitted_s, strict=True)
        ),
        r2=None if unfitted < 1e-12 else 1.0 - missed / unfitted,
        error=_left_out_error(law, series),
        num_fitted=num_fitted,
        coefficients=coefficients,
        draws=draws,
    )


def too_few(law: Law, num_ranks: int) -> str:
    """Report how many numbers of ranks a law needs, and how many there are."""
    return (
        f"needs points on {law.min_points} numbers of ranks of one source; the most on a line are"
        f" {num_ranks}"
    )


def _resampled(series: Series, fitted_s: np.ndarray, num_fitted: int, seed: int) -> np.ndarray:
    """Return resampled costs, shape (num_draws, num_points).

    Each point moves by the uncertainty of its own steps, and by a residual of some point for what
    they do not explain: runs that differ from each other, and a law that does not hold. Few
    residuals determine their size poorly, so each draw scales them by the root of a variance with
    as many degrees of freedom as the fit left.
    """
    rng = np.random.default_rng(seed)
    num_draws, num_points = series.deviations.shape
    residuals = np.log(series.rank_s_per_image / fitted_s)
    freedom = max(1, num_points - num_fitted)
    variance = float(residuals @ residuals) / freedom
    explained = float(np.mean(np.mean(series.deviations**2, axis=0)))
    share = np.sqrt(max(0.0, 1.0 - explained / variance)) if variance > 0.0 else 0.0
    sizes = np.sqrt(num_points / rng.chisquare(freedom, (num_draws, 1)))
    moved = (
        series.deviations
        + share * sizes * residuals[rng.integers(0, num_points, (num_draws, num_points))]
    )
    costs_s: np.ndarray = fitted_s * np.exp(np.clip(moved, -_MAX_LOG, _MAX_LOG))
    return costs_s


def _left_out_error(law: Law, series: Series) -> float:
    missed = []
    for place in range(len(series.ranks)):
        ranks, costs_s = (
            np.delete(values, place) for values in (series.ranks, series.rank_s_per_image)
        )
        coefficients = law.solve(ranks, 1.0 / costs_s, costs_s[None])
        guessed_s = law.predict(coefficients, series.ranks[place : place + 1])[0, 0]
        missed.append(abs(guessed_s / series.rank_s_per_image[place] - 1.0))
    return float(np.mean(missed))


def fit_laws(points: Sequence[Point], choice: str = "all", seed: int = 0) -> list[Fit]:
    """Return the fits of a study's lines, by line, the best first.

    `choice` is a law, all of those with enough points, or none.

    Raises:
        ConfigError: another choice, or one law for which no line has enough points.
    """
    if choice not in CHOICES:
        raise ConfigError("fit", choice, one_of(CHOICES))
    laws = _laws(choice)
    series = make_series(points)
    if choice in LAWS and not any(each.num_ranks >= LAWS[choice].min_points for each in series):
        raise ConfigError(
            "fit", choice, "; ".join(why_not_fitted(points, choice)), "add points to the study"
        )
    fits = [
        fit_law(law, each, seed)
        for each in series
        for law in laws
        if each.num_ranks >= law.min_points
    ]
    return sorted(fits, key=lambda fit: (fit.line, _merit(fit)))


def best_fits(fits: Iterable[Fit]) -> dict[str, Fit]:
    """Return the best fit of each line: that with the smallest leave-one-out error.

    A law with one more parameter must be better by a tenth; below 0.01 % the one with the fewest is
    best.
    """
    best: dict[str, Fit] = {}
    for fit in sorted(fits, key=_merit):
        best.setdefault(fit.line, fit)
    return best


def why_not_fitted(points: Sequence[Point], choice: str = "all") -> list[str]:
    """Return a reason for each law for which no line has enough points.

    Of a comparison only if a law was chosen.
    """
    if choice == "none" or (choice == "all" and scaling_kind(points) == "comparison"):
        return []
    most = max((each.num_ranks for each in make_series(points)), default=None)
    if most is None:
        kinds = "strong, weak or capability scaling"
        return [f"a fit needs points on {MIN_POINTS} numbers of ranks of one source in {kinds}"]
    return [f"{law.name} {too_few(law, most)}" for law in _laws(choice) if most < law.min_points]


def _laws(choice: str) -> list[Law]:
    return [] if choice == "none" else [LAWS[choice]] if choice in LAWS else list(LAWS.values())


def _merit(fit: Fit) -> tuple[float, int]:
    return max(fit.error, _FLOOR) * _HANDICAP**fit.num_fitted, fit.num_fitted


def fit_rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return fits as plain data; a parameter that is infinite (a peak that never comes) is None."""
    best = best_fits(fits)
    return [
        {
            "schedule": fit.line,
            "source": fit.source,
            "name": fit.law,
            "is_best": fit is best[fit.line],
            "formula": fit.formula,
            "parameters": {name: _finite(bounds.value) for name, bounds in fit.parameters.items()},
            "intervals": {
                name: [_finite(bounds.low), _finite(bounds.high)]
                for name, bounds in fit.parameters.items()
            },
            "residuals": [asdict(residual) for residual in fit.residuals],
            "extrapolation": [
                {"ranks": ranks, **_costs(fit.cost_s(ranks))}
                for ranks in (2 * fit.last_ranks, MAX_EXTRAPOLATION * fit.last_ranks)
            ],
            **{
                name: getattr(fit, name)
                for name in ("r2", "error", "first_ranks", "last_ranks", "limit_ranks")
            },
        }
        for fit in fits
    ]


def _costs(cost_s: Interval) -> dict[str, float]:
    return {
        "rank_s_per_image": cost_s.value,
        "rank_s_per_image_low": cost_s.low,
        "rank_s_per_image_high": cost_s.high,
    }


def curve_ranks(fit: Fit) -> np.ndarray:
    """Return the ranks at which a fit is drawn.

    Even on a logarithmic axis, the ends of data and limit among them.
    """
    within = np.geomspace(fit.first_ranks, fit.last_ranks, NUM_CURVE_POINTS)
    beyond = np.geomspace(fit.last_ranks, fit.limit_ranks, NUM_CURVE_POINTS // 2)
    within[[0, -1]], beyond[[0, -1]] = (
        (fit.first_ranks, fit.last_ranks),
        (fit.last_ranks, fit.limit_ranks),
    )
    return np.concatenate([within, beyond[1:]])


def curve_rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return the curves of fits as a table.

    Images/s and what an image costs, of images as large as the base's.
    """
    return [
        {
            "schedule": fit.line,
            "source": fit.source,
            "law": fit.law,
            "ranks": ranks,
            **_costs(Interval(*bounds)),
            "images_per_s": ranks / bounds[1],
            "is_extrapolated": int(ranks > fit.last_ranks),
        }
        for fit in fits
        for ranks, bounds in zip(
            curve_ranks(fit).tolist(), fit.curve(curve_ranks(fit)).T.tolist(), strict=True
        )
    ]


def fit_lines(fits: Sequence[Fit]) -> list[str]:
    """Return the best fit of each line, with intervals, errors and range, and the errors of the others."""
    lines = []
    for line, best in sorted(best_fits(fits).items()):
        lines.append(f"best fit of {line}: {_describe(best)}")
        others = [fit for fit in fits if fit.line == line and fit is not best]
        if others:
            shown = ", ".join(f"{fit.law} by {100 * fit.error:.1f} %" for fit in others)
            lines.append(f"  the others miss a left-out point: {shown}")
    return lines


def _describe(fit: Fit) -> str:
    shown = ", ".join(f"{name} {_bounds(bounds)}" for name, bounds in fit.parameters.items())
    r2 = "" if fit.r2 is None else f", R2 {fit.r2:.3f}"
    largest = max(abs(residual.relative) for residual in fit.residuals)
    return (
        f"{fit.law}, {shown}; {fit.source}, {fit.first_ranks} to {fit.last_ranks} ranks, not valid"
        f" beyond {fit.limit_ranks}; largest residual {100 * largest:.1f} %{r2}, misses a left-out"
        f" point by {100 * fit.error:.1f} %"
    )


def _bounds(interval: Interval) -> str:
    if not math.isfinite(interval.value):
        return "none"
    high = number(interval.high) if math.isfinite(interval.high) else "none"
    return f"{number(interval.value)} [{number(interval.low)}, {high}]"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

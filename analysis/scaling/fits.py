"""The fitted law of scaling of a study's lines: parameters, residuals, forecasts and curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.metrics.statistics import Interval
from analysis.scaling.law import FORMULA, Law, Row, fit_law
from analysis.scaling.points import Point, base_points, scaling_kind
from gems.trace import SOURCES
from gems.utils.units import number

MIN_POINTS = 3
NUM_CURVE_POINTS = 41


@dataclass(frozen=True, slots=True)
class Fit:
    """The law of a line, fitted to points of one source.

    A larger image counts as several images of the base.
    """

    line: str
    source: str
    law: Law

    @property
    def first_ranks(self) -> int:
        """The ranks of the smallest point."""
        return self.law.rows[0].accelerators

    def samples(self, ranks: float) -> float:
        """Return the images per rank at some ranks, by log-log interpolation between the points."""
        by_ranks = {row.accelerators: row.samples for row in self.law.rows}
        known = np.log(sorted(by_ranks))
        sizes = np.log([by_ranks[count] for count in sorted(by_ranks)])
        at = np.log(ranks)
        if at <= known[-1]:
            return float(np.exp(np.interp(at, known, sizes)))
        slope = (sizes[-1] - sizes[-2]) / (known[-1] - known[-2])
        return float(np.exp(sizes[-1] + slope * (at - known[-1])))

    def step_s(self, ranks: float) -> Interval:
        """Return the time of a step on some ranks, with its 95 % interval."""
        return self.law.step_s(ranks, self.samples(ranks))

    def images_per_s(self, ranks: float) -> Interval:
        """Return the rate in images of the base, with its 95 % interval."""
        step = self.step_s(ranks)
        images = ranks * self.samples(ranks)
        return Interval(images / step.high, images / step.value, images / step.low)


def fit_points(points: Sequence[Point]) -> list[Fit]:
    """Fit each line that has three numbers of ranks of one source, using the most real such source.

    A comparison has no fits, and neither has a study in which images and ranks change
    independently. Points whose work cannot be compared with that of the base are left out.
    """
    if scaling_kind(points) in ("comparison", "mixed"):
        return []
    fits = []
    for line, base in sorted(base_points(points).items()):
        for source in SOURCES:
            rows = [
                Row(point.ranks, share * point.images_per_step, point.step_median_s)
                for point in points
                if (point.line, point.source) == (line, source)
                if (share := point.work_beside(base)) is not None
            ]
            if len({row.accelerators for row in rows}) >= MIN_POINTS:
                fits.append(Fit(line, source, fit_law(rows)))
                break
    return fits


def why_not_fitted(points: Sequence[Point], fits: Sequence[Fit]) -> list[str]:
    """Return the reasons why no line is fitted; a comparison needs no reason."""
    if fits or scaling_kind(points) == "comparison":
        return []
    return [
        f"the law needs points on {MIN_POINTS} numbers of ranks of one source in strong, weak or"
        " capability scaling"
    ]


def fit_rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return fits as plain data."""
    return [
        {
            "schedule": fit.line,
            "source": fit.source,
            "formula": FORMULA,
            "parameters": fit.law.parameters,
            "last_row_share": fit.law.last_row_share,
            "residuals": [
                {"ranks": row.accelerators, "step_s": row.step_s, "relative": relative}
                for row, relative in _residuals(fit)
            ],
            "forecast_deviation": fit.law.deviation,
            "num_forecasts": fit.law.num_forecasts,
            "first_ranks": fit.first_ranks,
            "last_ranks": fit.law.last_ranks,
            "limit_ranks": fit.law.limit_ranks,
            "extrapolation": [
                _curve_row(fit, ranks) for ranks in (2 * fit.law.last_ranks, fit.law.limit_ranks)
            ],
        }
        for fit in fits
    ]


def curve_ranks(fit: Fit) -> np.ndarray:
    """Return the ranks at which a fit is drawn, evenly spaced on a logarithmic axis.

    They include the last ranks to which it is fitted.
    """
    within = np.geomspace(fit.first_ranks, fit.law.last_ranks, NUM_CURVE_POINTS)
    beyond = np.geomspace(fit.law.last_ranks, fit.law.limit_ranks, NUM_CURVE_POINTS // 2)
    within[-1] = beyond[0] = fit.law.last_ranks
    return np.concatenate([within, beyond[1:]])


def curve_rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return the curves of fits as a table."""
    return [_curve_row(fit, ranks) for fit in fits for ranks in curve_ranks(fit).tolist()]


def fit_lines(fits: Sequence[Fit]) -> list[str]:
    """Return a line of text for each fit."""
    lines = []
    for fit in fits:
        shown = ", ".join(f"{name} {number(value)}" for name, value in fit.law.parameters.items())
        largest = max(abs(relative) for _, relative in _residuals(fit))
        lines.append(
            f"law of {fit.line}: {shown}; {fit.source}, {fit.first_ranks} to {fit.law.last_ranks}"
            f" ranks, drawn to {fit.law.limit_ranks}; largest residual {100 * largest:.1f} %,"
            f" forecasts within {fit.law.deviation:.0%}"
        )
    return lines


def _residuals(fit: Fit) -> list[tuple[Row, float]]:
    """Return each row with its fitted step divided by the observed one, minus 1."""
    rows = fit.law.rows
    return [
        (row, fit.law.step_s(row.accelerators, row.samples).value / row.step_s - 1.0)
        for row in rows
    ]


def _curve_row(fit: Fit, ranks: float) -> dict[str, Any]:
    step = fit.step_s(ranks)
    rate = fit.images_per_s(ranks)
    return {
        "schedule": fit.line,
        "source": fit.source,
        "ranks": ranks,
        "step_s": step.value,
        "step_s_low": step.low,
        "step_s_high": step.high,
        "images_per_s": rate.value,
        "is_extrapolated": int(ranks > fit.law.last_ranks),
    }

"""Fits for people and programs: lines of a table, plain data, and the curves that a picture draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.metrics.statistics import Interval
from analysis.scaling.fits.fit import MAX_EXTRAPOLATION, Fit, best_fits
from gems.utils.units import number

NUM_CURVE_POINTS = 41


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
            "intervals": {name: [_finite(bounds.low), _finite(bounds.high)] for name, bounds in fit.parameters.items()},
            "residuals": [
                {
                    "ranks": residual.ranks,
                    "rank_s_per_image": residual.rank_s_per_image,
                    "fitted_rank_s_per_image": residual.fitted_s,
                    "relative": residual.relative,
                }
                for residual in fit.residuals
            ],
            "extrapolation": [_extrapolated(fit, fit.last_ranks * times) for times in (2, MAX_EXTRAPOLATION)],
            "r2": fit.r2,
            "error": fit.error,
            "first_ranks": fit.first_ranks,
            "last_ranks": fit.last_ranks,
            "limit_ranks": fit.limit_ranks,
        }
        for fit in fits
    ]


def _extrapolated(fit: Fit, ranks: int) -> dict[str, float]:
    cost_s = fit.cost_s(ranks)
    return {
        "ranks": ranks,
        "rank_s_per_image": cost_s.value,
        "rank_s_per_image_low": cost_s.low,
        "rank_s_per_image_high": cost_s.high,
    }


def curve_ranks(fit: Fit) -> np.ndarray:
    """Return the ranks at which a fit is drawn.

    Evenly on a logarithmic axis, the ends of data and of the limit among them.
    """
    within = np.geomspace(fit.first_ranks, fit.last_ranks, NUM_CURVE_POINTS)
    beyond = np.geomspace(fit.last_ranks, fit.limit_ranks, NUM_CURVE_POINTS // 2)
    within[[0, -1]], beyond[[0, -1]] = (fit.first_ranks, fit.last_ranks), (fit.last_ranks, fit.limit_ranks)
    return np.concatenate([within, beyond[1:]])


def curve_rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return the curves of fits as a table: images/s and what an image costs, of images as large as the base's."""
    return [
        {
            "schedule": fit.line,
            "source": fit.source,
            "law": fit.law,
            "ranks": float(ranks),
            "rank_s_per_image": value,
            "rank_s_per_image_low": low,
            "rank_s_per_image_high": high,
            "images_per_s": ranks / value,
            "is_extrapolated": int(ranks > fit.last_ranks),
        }
        for fit in fits
        for ranks, (low, value, high) in zip(
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
        f"{fit.law}, {shown}; {fit.source}, {fit.first_ranks} to {fit.last_ranks} ranks, not valid beyond "
        f"{fit.limit_ranks}; largest residual {100 * largest:.1f} %{r2}, "
        f"misses a left-out point by {100 * fit.error:.1f} %"
    )


def _bounds(interval: Interval) -> str:
    if not math.isfinite(interval.value):
        return "none"
    high = number(interval.high) if math.isfinite(interval.high) else "none"
    return f"{number(interval.value)} [{number(interval.low)}, {high}]"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Forecasts of a table's series.

Laws fitted to the rows up to some accelerators, and what they say of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.scaling.published import NOT_VERIFIED
from analysis.scaling.step_time import MAX_RATIO, Row, StepModel, fit_steps, next_row
from gems.errors import ConfigError

# a row of the first names its place
PUBLISHED = "published"
MEASURED = "measured"
BEYOND = (2, 4)  # times the accelerators of the last row, where a table has no more rows


def forecast_series(
    series: Mapping[str, Sequence[Row]], fit_to: int | None
) -> list[dict[str, Any]]:
    """Return for each series the law with the most weight, and forecasts of the rows beyond `fit_to` accelerators.

    Where all rows are fitted, as without `fit_to`, the forecasts are for two and four times the
    accelerators of the largest: with its batch if that of all rows is the same, else with its
    samples a rank. Series without a row of so few accelerators are left out. Nodes count if all
    rows of a series have them.

    Raises:
        ConfigError: no series has a row of so few accelerators.
    """
    found = [_answer(name, rows, fit_to) for name, rows in series.items()]
    answers = [answer for answer in found if answer is not None]
    if not answers:
        smallest = min(rows[0].accelerators for rows in series.values())
        raise ConfigError(
            "--fit-to", fit_to, f"leaves no row to fit to; the smallest has {smallest} accelerators"
        )
    return answers


def _answer(name: str, rows: Sequence[Row], fit_to: int | None) -> dict[str, Any] | None:
    if not all(row.nodes for row in rows):
        rows = [replace(row, nodes=None) for row in rows]
    fitted = [row for row in rows if fit_to is None or row.accelerators <= fit_to]
    if not fitted:
        return None
    model = fit_steps(fitted)
    last = fitted[-1]
    others = [row for row in rows if row not in fitted] or _larger_rows(fitted)
    following = next_row(model, fitted)
    is_published = any(row.where for row in fitted)
    return {
        "series": name,
        "source": PUBLISHED if is_published else MEASURED,
        "note": NOT_VERIFIED if is_published else "",
        "law": model.best.law.name,
        "formula": model.best.law.formula,
        "fit_to": last.accelerators,
        "num_fitted": len(fitted),
        "num_forecasts": model.num_forecasts,
        "weights": {
            fit.law.name: float(weight)
            for fit, weight in zip(model.fits, model.weights, strict=True)
        },
        "points": [_point(model, row) for row in others],
        "next": {"accelerators": following.accelerators, "global_batch": following.global_batch},
    }


def _larger_rows(fitted: Sequence[Row]) -> list[Row]:
    last = fitted[-1]
    has_one_batch = len(fitted) > 1 and len({row.global_batch for row in fitted}) == 1
    return [
        Row(
            last.accelerators * factor,
            last.global_batch * (1 if has_one_batch else factor),
            0.0,
            None if last.nodes is None else last.nodes * factor,
        )
        for factor in BEYOND
    ]


def _point(model: StepModel, row: Row) -> dict[str, Any]:
    found = model.step_s(row)
    measured = row.step_s or None
    return {
        "accelerators": row.accelerators,
        "global_batch": row.global_batch,
        "measured_step_s": measured,
        "predicted_step_s": found.value,
        "low_s": found.low,
        "high_s": found.high,
        "error": None if measured is None else found.value / measured - 1.0,
        "is_reliable": model.is_narrow(row) and row.accelerators <= MAX_RATIO * model.last_ranks,
        "where": row.where,
    }

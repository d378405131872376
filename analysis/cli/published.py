"""Published series: laws of the step's time fitted to the rows up to some ranks, and what they say of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.scaling.published import NOT_VERIFIED
from analysis.scaling.step_time import MAX_RATIO, Row, StepModel, fit_steps, next_row
from gems.errors import ConfigError
from gems.utils.tables import RIGHT, table
from gems.utils.units import number

PUBLISHED = "published"
BEYOND = (2, 4)  # times the ranks fitted to, where a table has no more rows


def published_answer(series: Mapping[str, Sequence[Row]], fit_to: int | None) -> list[dict[str, Any]]:
    """Return for each series the law with the most weight, and the rows beyond `fit_to` accelerators beside it.

    Where all rows are fitted, as without `fit_to`, the forecasts are for two and four times the accelerators of the
    largest, with its samples a rank.

    Raises:
        ConfigError: no series has a row of so few accelerators.
    """
    found = [_answer(name, rows, fit_to) for name, rows in series.items()]
    answers = [answer for answer in found if answer is not None]
    if not answers:
        smallest = min(rows[0].accelerators for rows in series.values())
        raise ConfigError("fit_to", fit_to, f"leaves no row to fit to; the smallest has {smallest} accelerators")
    return answers


def _answer(name: str, rows: Sequence[Row], fit_to: int | None) -> dict[str, Any] | None:
    fitted = [row for row in rows if fit_to is None or row.accelerators <= fit_to]
    if not fitted:
        return None
    model, last = fit_steps(fitted), fitted[-1]
    others = [row for row in rows if row not in fitted] or [_larger(last, factor) for factor in BEYOND]
    following = next_row(model, fitted)
    return {
        "series": name, "source": PUBLISHED, "note": NOT_VERIFIED, "law": model.best.law.name,
        "formula": model.best.law.formula, "fit_to": last.accelerators, "num_fitted": len(fitted),
        "num_forecasts": model.num_forecasts,
        "weights": {fit.law.name: float(weight) for fit, weight in zip(model.fits, model.weights, strict=True)},
        "points": [_point(model, row) for row in others],
        "next": {"accelerators": following.accelerators, "global_batch": following.global_batch},
    }  # fmt: skip


def _larger(row: Row, factor: int) -> Row:
    nodes = None if row.nodes is None else row.nodes * factor
    return Row(row.accelerators * factor, row.global_batch * factor, 0.0, nodes)


def _point(model: StepModel, row: Row) -> dict[str, Any]:
    found = model.step_s(row)
    measured = row.step_s or None
    return {
        "accelerators": row.accelerators, "global_batch": row.global_batch, "measured_step_s": measured,
        "predicted_step_s": found.value, "low_s": found.low, "high_s": found.high,
        "error": None if measured is None else found.value / measured - 1.0,
        "is_carried": model.carries(row) and row.accelerators <= MAX_RATIO * model.last_ranks, "where": row.where,
    }  # fmt: skip


def published_report(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all series, and what to measure next where no law carries a point."""
    columns = {
        "series": "", "law": "", "fitted to": "d", "accelerators": "d", "batch": "d", "measured [s]": RIGHT,
        "predicted [s]": RIGHT, "95 % interval": RIGHT, "error [%]": RIGHT,
    }  # fmt: skip
    rows = []
    notes = []
    for answer in answers:
        for point in answer["points"]:
            error, measured = point["error"], point["measured_step_s"]
            rows.append((
                answer["series"], answer["law"], answer["fit_to"], point["accelerators"], point["global_batch"],
                "-" if measured is None else number(measured), number(point["predicted_step_s"]),
                f"{number(point['low_s'])}-{number(point['high_s'])}", "-" if error is None else f"{100 * error:+.1f}",
            ))  # fmt: skip
        lost = [str(point["accelerators"]) for point in answer["points"] if not point["is_carried"]]
        if lost:
            following = answer["next"]
            notes.append(
                f"{answer['series']}: no law carries {', '.join(lost)} accelerators; to tell laws apart, measure "
                f"{following['accelerators']} with a global batch of {following['global_batch']}"
            )
    return "\n".join([table(columns, rows, title=f"published steps, {NOT_VERIFIED}"), *notes])

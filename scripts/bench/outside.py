"""Compare predictions with what others measured: pipelines, and series of scaling.

Pipelines: each row of a table (`--pipelines FILE`) is simulated from a data sheet and the one row
that calibrates it (`--calibrate ROW`), as `gems-analysis outside` does.

Laws of scaling:

Each series is fitted to its rows of up to p accelerators and predicts those of up to 4 p, for every
p that it has. Prints each forecast beside what was measured, and over all of them the median
and the largest error, and the share of measured times inside the 95 % interval; and the errors
without a law, of the step of the last row scaled by (samples a rank)^0.8. Other series: `--table
FILE`, as of `gems-analysis scaling --table`. `--part` chooses one of the two.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from analysis.outside.predict import outside_report, predict_table
from analysis.scaling.law import MAX_RATIO, Row, fit_law, scaled_last_row_s
from analysis.scaling.published import read_table
from scripts.bench import rig

DATA = Path(__file__).parents[1] / "data"
TABLE = DATA / "measured_scaling.csv"
PIPELINES = DATA / "pipelines_of_others.csv"


def main(argv: list[str] | None = None) -> int:
    """Predict both tables, print them with their errors, and return the exit code."""
    arguments = rig.options(
        __doc__,
        argv,
        table=TABLE,
        pipelines=PIPELINES,
        calibrate="4",
        part=("both", "pipelines", "laws"),
        json=False,
    )
    rig.machine()
    answer: dict[str, Any] = {}
    if arguments.part != "laws":
        answer["pipelines"] = predict_table(arguments.pipelines, arguments.calibrate)
        rig.log(outside_report(answer["pipelines"]))
    if arguments.part != "pipelines":
        answer |= forecast_table(arguments.table)
    return rig.answered(answer, False, arguments.json)


def forecast_table(path: Path) -> dict[str, Any]:
    """Fit and ask all series of a table, print them, and return forecasts and errors."""
    table = rig.Table(
        "series:<46",
        "fitted to=fit_to:>10d",
        "asked=accelerators:>8d",
        "batch=global_batch:>9d",
        "measured ms=measured_s:>13.2f",
        "predicted ms=predicted_s:>14.2f",
        "error %=error:>+9.1f",
        "interval + %=width:>13.0f",
        "inside:>8",
    )
    rows: list[dict[str, Any]] = []
    for name, measured in read_table(path).items():
        rows += table.rows(forecast_rows(name, measured))
    errors = summary(rows)
    rig.log(
        ", ".join(f"{name} {value:.3f}" for name, value in errors.items())
        + f", over {len(rows)} forecasts"
    )
    return {"forecasts": rows, **errors}


def forecast_rows(name: str, measured: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the forecasts of a series from each size to all up to four times as many devices."""
    for origin in sorted({row.accelerators for row in measured})[:-1]:
        fitted = [row for row in measured if row.accelerators <= origin]
        law = fit_law(fitted)
        for row in measured:
            if origin < row.accelerators <= MAX_RATIO * origin:
                step = law.step_s(row.accelerators, row.samples)
                plain_s = scaled_last_row_s(fitted, row.samples)
                yield {
                    "series": name,
                    "fit_to": origin,
                    "accelerators": row.accelerators,
                    "global_batch": row.global_batch,
                    "measured_s": row.step_s,
                    "predicted_s": step.value,
                    "error": step.value / row.step_s - 1.0,
                    "width": step.high / step.value - 1.0,
                    "inside": "yes" if step.low <= row.step_s <= step.high else "no",
                    "error_without_law": plain_s / row.step_s - 1.0,
                }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the errors with and without the law, the share inside, and the widest interval."""
    figures = {}
    for key in ("error", "error_without_law"):
        errors = [abs(row[key]) for row in rows]
        figures |= {f"median_{key}": statistics.median(errors), f"worst_{key}": max(errors)}
        figures[f"mean_{key}"] = statistics.fmean(errors)
    inside = statistics.mean(row["inside"] == "yes" for row in rows)
    return figures | {"share_inside": inside, "widest": max(row["width"] for row in rows)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Laws of scaling held against what others have measured: each series fitted to its smaller runs, asked for the larger.

Each series is fitted to its rows of up to p accelerators and asked for those of up to 4 p, for every p that it has. The
rows beyond p have no part in the choice of a law. Prints each forecast beside what was measured, and over all of them
the median and the largest error, the share of measured times inside the 95 % interval, and the widest interval. Other
series: `--table FILE` (see `analysis scaling --table`).
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from analysis.cli.published import published_answer
from analysis.scaling.published import choose_series, read_table
from analysis.scaling.step_time import MAX_RATIO
from scripts.bench import rig

TABLE = Path(__file__).parents[1] / "data" / "measured_scaling.csv"


def main(argv: list[str] | None = None) -> int:
    """Fit and ask all series, print the table and the summary, and return the exit code."""
    given = rig.options(__doc__, argv, table=str(TABLE), series="", json=False)
    rig.machine()
    table = rig.Table(
        "series:<46", "law:<12", "fitted to=fit_to:>10d", "asked=accelerators:>8d", "batch=global_batch:>9d",
        "measured ms=measured_step_s:>13.2f", "predicted ms=predicted_step_s:>14.2f", "error %=error:>9.1f",
        "interval +- %=half_width:>15.0f", "inside=inside:>8",
    )  # fmt: skip
    series = choose_series(read_table(Path(given.table)), given.series or None)
    rows = []
    for name, measured in series.items():
        for origin in sorted({row.accelerators for row in measured})[:-1]:
            (answer,) = published_answer({name: measured}, origin)
            asked = [point for point in answer["points"] if point["accelerators"] <= MAX_RATIO * origin]
            rows += table.rows(forecast_row(answer, point) for point in asked)
    found = summary(rows)
    rig.log(
        f"{len(rows)} forecasts: median error {100 * found['median_error']:.1f} %, worst "
        f"{100 * found['worst_error']:.1f} %; {100 * found['share_inside']:.0f} % inside the interval, which is "
        f"{100 * found['widest']:.0f} % wide at most to either side"
    )
    return rig.answered({"forecasts": rows, **found}, False, given.json)


def forecast_row(answer: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table: a point of an answer beside what was measured."""
    inside = point["low_s"] <= point["measured_step_s"] <= point["high_s"]
    half_width = point["high_s"] / point["predicted_step_s"] - 1.0
    return {
        **{name: answer[name] for name in ("series", "law", "fit_to")}, **point, "half_width": half_width,
        "inside": "yes" if inside else "no",
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the errors over all forecasts, the share inside of the intervals, and half of the widest."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "median_error": statistics.median(errors), "worst_error": max(errors),
        "share_inside": statistics.mean(row["inside"] == "yes" for row in rows),
        "widest": max(row["half_width"] for row in rows),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

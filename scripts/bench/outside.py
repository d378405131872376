"""Laws of scaling held against what others have measured.

Each series fitted to its smaller runs, asked for the larger.
Each series is fitted to its rows of up to p accelerators and asked for those of up to 4 p, for
every p that it has. The rows beyond p have no part in the choice of a law. Prints each forecast
beside what was measured, and over all of them the median and the largest error, the share of
measured times inside the 95 % interval, and the widest interval; and the errors of a forecast
without a law, the step of the last row fitted to, by (samples a rank)^0.75. Other series: `--table
FILE` (see `analysis scaling --table`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from analysis.scaling.forecasts import forecast_series
from analysis.scaling.published import choose_series, read_table
from analysis.scaling.step_time import MAX_RATIO, Row
from gems.errors import ConfigError, GemsError
from gems.utils.stdio import report
from scripts.bench import rig

TABLE = Path(__file__).parents[1] / "data" / "measured_scaling.csv"
ELASTICITY = 0.75  # of a step's time by the samples a rank, where no law is fitted


def main(argv: list[str] | None = None) -> int:
    """Fit and ask all series, print the table and the summary, and return the exit code."""
    given = rig.options(__doc__, argv, table=str(TABLE), series="", json=False)
    rig.machine()
    table = rig.Table(
        "series:<46",
        "law:<12",
        "fitted to=fit_to:>10d",
        "asked=accelerators:>8d",
        "batch=global_batch:>9d",
        "measured ms=measured_step_s:>13.2f",
        "predicted ms=predicted_step_s:>14.2f",
        "error %=error:>9.1f",
        "interval +- %=half_width:>15.0f",
        "inside=inside:>8",
    )
    rows: list[dict[str, Any]] = []
    try:
        for name, measured in choose_series(
            read_table(Path(given.table)), given.series or None
        ).items():
            rows += table.rows(forecast_rows(name, measured))
        if not rows:
            raise ConfigError(
                "table",
                given.table,
                f"has no two sizes within a factor of {MAX_RATIO:.0f} in a series",
            )
    except GemsError as error:
        report("outside", str(error))
        return error.exit_code
    found = summary(rows)
    rig.log(
        f"{len(rows)} forecasts: median error {100 * found['median_error']:.1f} %, worst"
        f" {100 * found['worst_error']:.1f} %; {100 * found['share_inside']:.0f} % inside the"
        f" interval, which is {100 * found['widest']:.0f} % wide at most to either side; without a"
        f" law: median {100 * found['median_error_without_law']:.1f} %, worst"
        f" {100 * found['worst_error_without_law']:.1f} %"
    )
    return rig.answered({"forecasts": rows, **found}, False, given.json)


def forecast_rows(name: str, measured: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each forecast of a series, from each number of accelerators to all up to 4 times."""
    for origin in sorted({row.accelerators for row in measured})[:-1]:
        (answer,) = forecast_series({name: measured}, origin)
        last = [row for row in measured if row.accelerators <= origin][-1]
        for point in answer["points"]:
            if point["accelerators"] > MAX_RATIO * origin:
                continue
            samples = point["global_batch"] / point["accelerators"]
            measured_s = point["measured_step_s"]
            yield {
                **{key: answer[key] for key in ("series", "law", "fit_to")},
                **point,
                "half_width": point["high_s"] / point["predicted_step_s"] - 1.0,
                "inside": "yes" if point["low_s"] <= measured_s <= point["high_s"] else "no",
                "error_without_law": (
                    last.step_s * (samples / last.samples) ** ELASTICITY / measured_s - 1.0
                ),
            }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the errors over all forecasts, the share inside of the intervals, and half of the widest."""
    errors, others = ([abs(row[key]) for row in rows] for key in ("error", "error_without_law"))
    return {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "median_error_without_law": statistics.median(others),
        "worst_error_without_law": max(others),
        "share_inside": statistics.mean(row["inside"] == "yes" for row in rows),
        "widest": max(row["half_width"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())

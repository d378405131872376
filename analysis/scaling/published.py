"""Published step times: a CSV with a row per number of accelerators, and forecasts of larger rows.

The columns are series, accelerators, global_batch, and step_s or epoch_s with train_samples; source
is optional. Lines that begin with `#` are notes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.scaling.law import FORMULA, MAX_RATIO, WIDEST, Law, Row, fit_law
from gems.errors import ConfigError, nearest
from gems.utils.tables import RIGHT, table
from gems.utils.units import number

NEEDED = ("series", "accelerators", "global_batch")
NOT_VERIFIED = "not verified by MLCommons"
# a published row names where it was published
PUBLISHED = "published"
MEASURED = "measured"
# multiples of the last row's accelerators, if a table has no more rows
BEYOND = (2, 4)
STEP_S = (1e-9, 1e9)
MOST_WHOLE = 2**31


def read_table(path: Path) -> dict[str, list[Row]]:
    """Read a table and return the rows of each series by accelerators.

    Raises:
        ConfigError: The file cannot be read, or a row lacks data for the time of a step.
    """
    try:
        # spreadsheets begin a file with a byte order mark
        lines = path.read_text("utf-8-sig").splitlines()
        numbered = [
            (number, line)
            for number, line in enumerate(lines, 1)
            if line.strip() and line[0] != "#"
        ]
        reader = csv.DictReader((line for _, line in numbered), strict=True, skipinitialspace=True)
        reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
        missing = [name for name in NEEDED if name not in reader.fieldnames]
        if missing:
            raise ConfigError(
                "table", path, f"has no column {', '.join(missing)}", "separate columns by commas"
            )
        series: dict[str, list[Row]] = {}
        for cells in reader:
            number = numbered[reader.line_num - 1][0]
            if any(cells.get(None) or ()) or not (cells["series"] or "").strip():
                raise ConfigError(
                    "table",
                    path,
                    f"line {number} has no series, or more cells than there are columns",
                )
            series.setdefault(cells["series"], []).append(_row(path, number, cells))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            "table", path, f"cannot be read ({why})", "give a CSV of step times"
        ) from error
    if not series:
        raise ConfigError("table", path, "has no row")
    return {
        name: sorted(rows, key=lambda row: (row.accelerators, row.global_batch))
        for name, rows in series.items()
    }


def _row(path: Path, line: int, cells: Mapping[str, str]) -> Row:
    def positive(name: str, most: float = math.inf) -> float:
        try:
            value = float(cells.get(name) or "")
        except ValueError:
            value = math.nan
        if not 0 < value <= most or math.isinf(value):
            shown = (cells.get(name) or "")[:40]
            raise ConfigError(
                "table",
                path,
                f"line {line}: {name} is {shown!r}, and must be a number above 0, written as 1024"
                " or 0.25",
            )
        return value

    accelerators, batch = (positive(name, MOST_WHOLE) for name in NEEDED[1:])
    if not (accelerators.is_integer() and batch.is_integer()):
        raise ConfigError(
            "table", path, f"line {line}: accelerators and global_batch must be whole numbers"
        )
    if cells.get("step_s"):
        step_s = positive("step_s")
    else:
        step_s = positive("epoch_s") / math.ceil(positive("train_samples") / batch)
    if not STEP_S[0] <= step_s <= STEP_S[1]:
        raise ConfigError(
            "table",
            path,
            f"line {line}: a step of {step_s:g} s: allowed {STEP_S[0]:g} to {STEP_S[1]:g}",
        )
    return Row(int(accelerators), int(batch), step_s, cells.get("source") or "")


def choose_series(series: Mapping[str, list[Row]], name: str | None) -> dict[str, list[Row]]:
    """Return the series of that name, else those whose names contain it in any case, or all.

    Raises:
        ConfigError: There is no such series.
    """
    if name is None or name in series:
        return dict(series) if name is None else {name: series[name]}
    matches = {key: rows for key, rows in series.items() if name.lower() in key.lower()}
    if not matches:
        advice = f"allowed: {'; '.join(series)}; nearest: {nearest(name, series, 1)[0]}"
        raise ConfigError("series", name, "is not in the table", advice)
    return matches


def forecast_series(
    series: Mapping[str, Sequence[Row]], fit_to: int | None
) -> list[dict[str, Any]]:
    """Return forecasts for each series of the rows beyond `fit_to` accelerators.

    If no row is left, they are for two and four times the largest number of accelerators: with its
    batch if that of all rows is the same, else with its samples per rank. Series without a row of
    so few accelerators are left out.

    Raises:
        ConfigError: No series has a row of so few accelerators.
    """
    answers = []
    for name, rows in series.items():
        fitted = [row for row in rows if fit_to is None or row.accelerators <= fit_to]
        if fitted:
            forecast = [row for row in rows if row not in fitted] or _larger_rows(fitted)
            answers.append(_answer(name, fit_law(fitted), forecast))
    if not answers:
        smallest = min(rows[0].accelerators for rows in series.values())
        raise ConfigError(
            "--fit-to", fit_to, f"leaves no row to fit to; the smallest has {smallest} accelerators"
        )
    return answers


def _larger_rows(fitted: Sequence[Row]) -> list[Row]:
    last = fitted[-1]
    has_one_batch = len(fitted) > 1 and len({row.global_batch for row in fitted}) == 1
    batches = [last.global_batch * (1 if has_one_batch else factor) for factor in BEYOND]
    return [
        Row(last.accelerators * factor, batch, 0.0)
        for factor, batch in zip(BEYOND, batches, strict=True)
    ]


def _answer(name: str, law: Law, asked: Sequence[Row]) -> dict[str, Any]:
    is_published = any(row.where for row in law.rows)
    return {
        "series": name,
        "source": PUBLISHED if is_published else MEASURED,
        "note": NOT_VERIFIED if is_published else "",
        "formula": FORMULA,
        "parameters": law.parameters,
        "last_row_share": law.last_row_share,
        "fit_to": law.last_ranks,
        "num_fitted": len(law.rows),
        "num_forecasts": law.num_forecasts,
        "points": [_point(law, row) for row in asked],
    }


def _point(law: Law, row: Row) -> dict[str, Any]:
    step = law.step_s(row.accelerators, row.samples)
    measured = row.step_s or None
    return {
        "accelerators": row.accelerators,
        "global_batch": row.global_batch,
        "measured_step_s": measured,
        "predicted_step_s": step.value,
        "low_s": step.low,
        "high_s": step.high,
        "error": None if measured is None else step.value / measured - 1.0,
        "is_reliable": law.is_reliable(row.accelerators, row.samples),
        "where": row.where,
    }


def published_report(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all forecasts with the measurements, and those that are too uncertain."""
    columns = {
        "series": "",
        "fitted to": "d",
        "accelerators": "d",
        "batch": "d",
        "measured [s]": RIGHT,
        "predicted [s]": RIGHT,
        "95 % interval": RIGHT,
        "error [%]": RIGHT,
    }
    rows = []
    notes = []
    for answer in answers:
        for point in answer["points"]:
            error = point["error"]
            measured = point["measured_step_s"]
            rows.append(
                (
                    answer["series"],
                    answer["fit_to"],
                    point["accelerators"],
                    point["global_batch"],
                    "-" if measured is None else number(measured),
                    number(point["predicted_step_s"]),
                    f"{number(point['low_s'])}-{number(point['high_s'])}",
                    "-" if error is None else f"{100 * error:+.1f}",
                )
            )
        unreliable = [
            str(point["accelerators"]) for point in answer["points"] if not point["is_reliable"]
        ]
        if unreliable:
            why = (
                f"wider than +{WIDEST:.0%}, or above {MAX_RATIO:.0f} times the {answer['fit_to']}"
                " fitted to"
            )
            advice = f"measure {2 * answer['fit_to']}"
            notes.append(
                f"{answer['series']}: too uncertain for {', '.join(unreliable)} accelerators"
                f" ({why}); {advice}"
            )
    is_published = all(answer["source"] == PUBLISHED for answer in answers)
    title = (
        f"published steps, {NOT_VERIFIED}" if is_published else "forecasts of the table's series"
    )
    return "\n".join([table(columns, rows, title=title), *notes])

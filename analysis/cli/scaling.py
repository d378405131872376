"""The scaling study: its table, pictures and CSVs, from traces of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.io.files import refuse_unwritable, write_csv
from analysis.plots.figure import save_figure
from analysis.plots.scaling import scaling_figure
from analysis.scaling.fits import Fit, curve_rows, fit_lines, fit_points, fit_rows, why_not_fitted
from analysis.scaling.points import (
    Point,
    agreements,
    base_points,
    base_rows,
    describe_base,
    in_units,
    point_rows,
    rate_name,
    read_points,
    scaling_kind,
    title,
)
from analysis.scaling.rules import Rule, check_rules, rule_lines
from gems.utils.tables import RIGHT, table
from gems.utils.units import Unit, number, time_unit

PICTURE_SUFFIXES = (".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Study:
    """The points of a study, the law of each line, which claims the plot supports, and the files.

    `tables` are CSVs of the points, and of the curves of the laws if there are any; `pictures` are
    PNG and PDF.
    """

    points: list[Point]
    fits: list[Fit]
    unfitted: list[str]
    rules: list[Rule]
    tables: list[Path]
    pictures: list[Path]


def write_study(paths: Sequence[Path], out: Path) -> Study:
    """Read runs and write scaling.png, scaling.pdf and scaling.csv into the new folder `out`.

    The curves of the laws go to scaling-fits.csv.

    Raises:
        ConfigError: A run that cannot be read, or a folder that cannot be written.
    """
    points = read_points(paths)
    fits = fit_points(points)
    with refuse_unwritable(out):
        out.mkdir(parents=True, exist_ok=True)
        tables = [write_csv(point_rows(points), out / "scaling.csv")]
        curves = out / "scaling-fits.csv"
        if fits:
            tables.append(write_csv(curve_rows(fits), curves))
        else:
            curves.unlink(missing_ok=True)
    figure = scaling_figure(points, fits)
    pictures = [out / f"scaling{suffix}" for suffix in PICTURE_SUFFIXES]
    for picture in pictures:
        save_figure(figure, picture)
    return Study(points, fits, why_not_fitted(points, fits), check_rules(points), tables, pictures)


def study_answer(study: Study) -> dict[str, Any]:
    """Return a study as plain data."""
    kind = scaling_kind(study.points)
    return {
        "scaling": kind,
        "kind": kind,
        "base": base_rows(study.points),
        "points": point_rows(study.points),
        "agreement": agreements(study.points),
        "fits": fit_rows(study.fits),
        "unfitted": study.unfitted,
        "rules": [asdict(rule) for rule in study.rules],
        "pictures": [str(picture) for picture in study.pictures],
        "csv": str(study.tables[0]),
        "tables": [str(table) for table in study.tables],
    }


def study_report(study: Study) -> str:
    """Return the text to print: the table, the fits, and the rules that do not hold."""
    unfitted = [f"not fitted: {reason}" for reason in study.unfitted]
    lines = [study_table(study.points), *fit_lines(study.fits), *unfitted, *rule_lines(study.rules)]
    return "\n".join(lines)


def study_table(points: Sequence[Point]) -> str:
    """Return a line for each point with the 95 % interval of its median; efficiencies in %."""
    unit = time_unit([point.step_median_s for point in points], in_units(points))
    columns = {
        "schedule": "",
        "source": "",
        "ranks": "d",
        rate_name(points): RIGHT,
        f"step [{unit.name}]": RIGHT,
        "95 % interval": RIGHT,
        "p95": RIGHT,
        "parallel [%]": ".1f",
        "compute [%]": ".1f",
    }
    rows = [
        (
            row["schedule"],
            row["source"],
            row["ranks"],
            number(row["images_per_s"]),
            unit.show(row["step_median_s"]),
            _bounds(point, unit),
            unit.show(row["step_p95_s"]),
            *(
                None if row[name] is None else 100 * row[name]
                for name in ("parallel_efficiency", "compute_efficiency")
            ),
        )
        for point, row in zip(points, point_rows(points), strict=True)
    ]
    bases = sorted(
        f"base of {line}: {describe_base(base)}" for line, base in base_points(points).items()
    )
    is_range = any(point.has_range for point in points)
    note = ["a to b: fewer than 6 steps, so their range and no interval"] if is_range else []
    return "\n".join([table(columns, rows, title=title(points)[0]), *note, *bases])


def _bounds(point: Point, unit: Unit) -> str:
    """Return an interval as `a-b`, a range as `a to b`, and `-` if all steps are equal."""
    step = point.step_interval_s
    if point.is_deterministic:
        return "-"
    return f"{unit.show(step.low)}{' to ' if step.is_range else '-'}{unit.show(step.high)}"

"""The scaling study: its table, pictures and CSVs, from traces of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.io.csv_file import write_csv
from analysis.metrics.statistics import Interval
from analysis.plots.figure import save_figure
from analysis.plots.projection import place_rows, projection_table, sensitivity_rows, write_projection
from analysis.plots.scaling import base_words, scaling_figure, title
from analysis.scaling.efficiency import agreement_rows, base_rows, bases_of, kind_of, rows_of
from analysis.scaling.fits import Fit, fits_of, why_not_fitted
from analysis.scaling.fits.format import curve_rows, fit_lines, fit_rows
from analysis.scaling.point_reading import read_points
from analysis.scaling.points import Point
from analysis.scaling.projection import Projection, project
from analysis.scaling.rules import Rule, rule_lines, rules_of
from gems.errors import ConfigError
from gems.utils.units import Unit, number, time_unit

STEM = "scaling"
PICTURES = (".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Study:
    """What was read, what was made of it, and the files that were written.

    Attributes:
        points: by line, ranks and source.
        fits: by line, the best first.
        unfitted: why a law was not fitted.
        rules: what the plot may claim.
        tables: CSV: of the points, and of the curves of the fits where there are any.
        pictures: PNG and PDF.
        projection: bands and sensitivities of a study that is a prediction throughout, None of another.
    """

    points: list[Point]
    fits: list[Fit]
    unfitted: list[str]
    rules: list[Rule]
    tables: list[Path]
    pictures: list[Path]
    projection: Projection | None = None

    @property
    def csv(self) -> Path:
        """The table of the points."""
        return self.tables[0]


def write_study(paths: Sequence[Path], out: Path, fit: str = "all") -> Study:
    """Read runs, writes scaling.png, scaling.pdf and scaling.csv into the folder `out`, which is made.

    `fit` is a law, all of them or none. The curves of the fits go to scaling-fits.csv.
    A study that is a prediction throughout gets the bands of `analysis.scaling.projection` beside it.

    Raises:
        ConfigError: a run that cannot be read, a law that has too few points, or a folder that cannot be written.
    """
    points = read_points(paths)
    fits = fits_of(points, fit)
    try:
        out.mkdir(parents=True, exist_ok=True)
        tables = [write_csv(rows_of(points), out / f"{STEM}.csv")]
        curves = out / f"{STEM}-fits.csv"
        if fits:
            tables.append(write_csv(curve_rows(fits), curves))
        else:
            curves.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError("out", out, f"cannot be written ({error.strerror or error})") from error
    figure = scaling_figure(points, fits)
    pictures = [out / f"{STEM}{suffix}" for suffix in PICTURES]
    for picture in pictures:
        save_figure(figure, picture)
    projection = project(points, paths)
    if projection is not None:
        pictures += write_projection(projection, out)
    return Study(points, fits, why_not_fitted(points, fit), rules_of(points), tables, pictures, projection)


def study_answer(study: Study) -> dict[str, Any]:
    """Return a study as plain data."""
    kind, projection = kind_of(study.points), study.projection
    predicted = {}
    if projection is not None:
        predicted = {"bands": place_rows(projection), "sensitivities": sensitivity_rows(projection)}
    return {
        "scaling": kind,
        "kind": kind,
        "base": base_rows(study.points),
        "points": rows_of(study.points),
        "agreement": agreement_rows(study.points),
        "fits": fit_rows(study.fits),
        "unfitted": study.unfitted,
        "rules": [asdict(rule) for rule in study.rules],
        "pictures": [str(picture) for picture in study.pictures],
        "csv": str(study.csv),
        "tables": [str(table) for table in study.tables],
        **predicted,
    }


def study_report(study: Study) -> str:
    """Return what is printed: the table, the fits, and the rules that do not hold."""
    return "\n".join(
        [
            study_table(study.points),
            *([] if study.projection is None else [projection_table(study.projection)]),
            *fit_lines(study.fits),
            *(f"not fitted: {reason}" for reason in study.unfitted),
            *rule_lines(study.rules),
        ]
    )


def study_table(points: Sequence[Point]) -> str:
    """Return the table for people: a line a point with the 95 % interval of its median; efficiencies in %."""
    unit = time_unit([point.step_median_s for point in points])
    head = (
        "schedule",
        "source",
        "ranks",
        "images/s",
        f"step [{unit.name}]",
        "95 % interval",
        "p95",
        "parallel [%]",
        "compute [%]",
    )
    rows = [head]
    for point, row in zip(points, rows_of(points), strict=True):
        shares = (row["parallel_efficiency"], row["compute_efficiency"])
        rows.append(
            (
                row["schedule"], row["source"], str(row["ranks"]), number(row["images_per_s"]),
                unit.show(row["step_median_s"]), _bounds(point, unit), unit.show(row["step_p95_s"]),
                *("-" if value is None else f"{100 * value:.1f}" for value in shares),
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    shown = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    bases = [f"base of {line}: {base_words(base)}" for line, base in bases_of(points).items()]
    note = ["a to b: fewer than 6 steps, so their range and no interval"] if any(map(_is_range, points)) else []
    return "\n".join([title(points)[0], *shown, *note, *sorted(bases)])


def _is_range(point: Point) -> bool:
    return point.step_interval_s.is_range and not point.is_deterministic


def _bounds(point: Point, unit: Unit) -> str:
    """Return an interval as `a-b`, a range as `a to b`, and nothing where steps are all alike, as on paper."""
    step: Interval = point.step_interval_s
    if point.is_deterministic:
        return "-"
    return f"{unit.show(step.low)}{' to ' if step.is_range else '-'}{unit.show(step.high)}"

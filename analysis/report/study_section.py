"""Several runs on one page: how they scale, by which law, their predictions, and which claims the picture supports."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from analysis.plots.scaling import scaling_figure
from analysis.report.markup import Html, element, svg_image
from analysis.report.table import Cell, Table
from analysis.scaling.efficiency import Agreement, agreements, base_points, describe_base, point_rows, title
from analysis.scaling.fits import fit_laws, fit_lines, why_not_fitted
from analysis.scaling.points import read_points
from analysis.scaling.rules import Rule, check_rules

COLUMNS = {
    "schedule": "schedule", "source": "source", "ranks": "ranks", "partitions": "partitions", "replicas": "replicas",
    "micro_batches": "micro-batches", "images_per_step": "images/step", "num_steps": "steps",
    "step_median_s": "step, median [s]", "step_low_s": "from [s]", "step_high_s": "to [s]", "step_bounds": "these are",
    "images_per_s": "images/s", "parallel_efficiency": "parallel efficiency",
    "compute_efficiency": "compute efficiency", "base_ranks": "base, ranks", "base_images_per_s": "base, images/s",
}  # fmt: skip


def study_section(runs: Sequence[Path]) -> Html:
    """Build the section that compares runs, from their steps and configurations alone.

    Raises:
        ConfigError: a run without a whole step after warm-up, or one whose trace does not hold its configuration.
    """
    points = read_points(runs)
    fits = fit_laws(points)
    headline, detail = title(points)
    picture = io.BytesIO()
    scaling_figure(points, fits).savefig(picture, format="svg", facecolor="white")
    rows: list[tuple[Cell, ...]] = [tuple(row[key] for key in COLUMNS) for row in point_rows(points)]
    table = Table("points", "Points of the study", tuple(COLUMNS.values()), rows, (4,) * len(COLUMNS))
    bases = base_points(points)
    stated = [f"base of {line}: {describe_base(bases[line])}" for line in dict.fromkeys(point.line for point in points)]
    laws = [*fit_lines(fits), *(f"not fitted: {reason}" for reason in why_not_fitted(points))]
    predicted = agreements(points)
    parts = [
        element("h2", headline),
        element("p", detail),
        element("ul", *(element("li", text) for text in stated)),
        element("figure", svg_image(picture.getvalue(), f"{headline}: images/s and efficiency over ranks")),
        element("ul", *(element("li", text) for text in laws)),
        table.html(),
        *([_agreement(predicted).html()] if predicted else []),
        _rules(check_rules(points)).html(),
    ]
    return element("section", *parts, id="study")


def _rules(rules: Sequence[Rule]) -> Table:
    text = {True: "kept", False: "not kept", None: "not applicable"}
    rows: list[tuple[Cell, ...]] = [(rule.number, rule.title, text[rule.holds], rule.text) for rule in rules]
    return Table(
        "rules", "Which claims this picture supports", ("rule", "it asks for", "verdict", "why"), rows, (0,) * 4
    )


def _agreement(found: Sequence[Agreement]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (each.line, each.ranks, each.source, each.step_s, each.simulated_s, 100 * each.error) for each in found
    ]
    columns = ("schedule", "ranks", "run", "step of the run [s]", "simulated step [s]", "error [%]")
    return Table("agreement", "Simulated beside what ran", columns, rows, (0, 0, 0, 4, 4, 2))

"""Build the page; runs are read one after another, so only one is in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from analysis.io.files import refuse_unwritable
from analysis.io.load import load_trace
from analysis.plots.figure import as_svg
from analysis.plots.scaling import scaling_figure
from analysis.report.canvas_data import TRACKS, looks_json
from analysis.report.html import (
    Cell,
    Html,
    Table,
    data_element,
    element,
    filled,
    joined,
    own_file,
    picture,
)
from analysis.report.proposal import proposal_section
from analysis.report.run_section import MAX_EVENTS, RunSection, run_section, source_mark
from analysis.scaling.fits import fit_lines, fit_points, why_not_fitted
from analysis.scaling.points import (
    Point,
    agreements,
    base_points,
    describe_base,
    in_units,
    point_rows,
    rate_name,
    read_points,
    title,
)
from analysis.scaling.proposal import Proposal
from analysis.scaling.rules import check_rules
from gems.errors import ConfigError
from gems.utils.atomic_io import atomic_write

MAX_RUNS = 16
POINT_COLUMNS = {
    "schedule": "schedule",
    "source": "source",
    "ranks": "ranks",
    "partitions": "partitions",
    "replicas": "replicas",
    "micro_batches": "micro-batches",
    "images_per_step": "images/step",
    "num_steps": "steps",
    "step_median_s": "step, median [s]",
    "step_low_s": "from [s]",
    "step_high_s": "to [s]",
    "step_bounds": "these are",
    "images_per_s": "images/s",
    "parallel_efficiency": "parallel efficiency",
    "compute_efficiency": "compute efficiency",
    "base_ranks": "base, ranks",
    "base_images_per_s": "base, images/s",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The written file and its content."""

    path: Path
    size_bytes: int
    num_events: int
    runs: tuple[str, ...]
    notes: tuple[str, ...]


def build_report(runs: Sequence[Path], out: Path, proposal: Proposal | None = None) -> Report:
    """Write one page about a run, or about several with a section that compares them.

    Up to 16 runs have sections of their own; of more, the first, the last and runs spread evenly
    between them. All runs are in the table of the study. Runs share the limit on events, see
    `select_events`. A proposal comes first.

    Raises:
        ConfigError: A run cannot be read, or the page cannot be written.
    """
    if not runs:
        raise ConfigError("report", "none", "name at least one run")
    shown = spread(runs, MAX_RUNS)
    notes = (
        [f"{len(shown)} of {len(runs)} runs have a section of their own"]
        if len(shown) < len(runs)
        else []
    )
    sections: list[RunSection] = []
    for place, path in enumerate(shown):
        loaded = load_trace(path)
        notes += [f"{path.name}: {note}" for note in loaded.notes]
        name = (
            path.resolve().parent.name if path.resolve().name == "trace.h5" else path.resolve().name
        )
        sections.append(run_section(place, name, loaded, MAX_EVENTS // len(shown)))
    study = [] if proposal is None else [proposal_section(proposal)]
    if len(runs) > 1:
        try:
            study.append(_study_section(runs))
        except ConfigError as error:
            notes.append(f"no scaling section: {error}")
    with refuse_unwritable(out):
        with atomic_write(out) as partial:
            partial.write_text(_page(sections, study, notes), encoding="utf-8")
        size_bytes = out.stat().st_size
    return Report(
        out,
        size_bytes,
        sum(section.num_events for section in sections),
        tuple(map(str, runs)),
        tuple(notes),
    )


def spread(runs: Sequence[Path], count: int) -> list[Path]:
    """Return at most `count` of the runs, spread evenly, including the first and the last."""
    if len(runs) <= count:
        return list(runs)
    return [runs[round(place * (len(runs) - 1) / (count - 1))] for place in range(count)]


def _study_section(runs: Sequence[Path]) -> Html:
    """Build the section that compares runs, from their steps and configurations alone.

    Raises:
        ConfigError: A run has no whole step after warm-up, or its trace lacks its configuration.
    """
    points = read_points(runs)
    fits = fit_points(points)
    headline, detail = title(points)
    bases = base_points(points)
    lines = dict.fromkeys(point.line for point in points)
    stated = [element("li", f"base of {line}: {describe_base(bases[line])}") for line in lines]
    laws = [*fit_lines(fits), *(f"not fitted: {reason}" for reason in why_not_fitted(points, fits))]
    return element(
        "section",
        element("h2", headline),
        element("p", detail),
        element("ul", *stated),
        picture(
            as_svg(scaling_figure(points, fits)), f"{headline}: images/s and efficiency over ranks"
        ),
        element("ul", *(element("li", text) for text in laws)),
        *(table.html() for table in _study_tables(points)),
        id="study",
    )


def _study_tables(points: Sequence[Point]) -> list[Table]:
    rows: list[tuple[Cell, ...]] = [
        tuple(row[key] for key in POINT_COLUMNS) for row in point_rows(points)
    ]
    columns = tuple(POINT_COLUMNS.values())
    if in_units(points):
        columns = tuple(
            name.replace("[s]", "[units]").replace("images/s", rate_name(points))
            for name in columns
        )
    tables = [Table("points", "Points of the study", columns, rows, (4,) * len(POINT_COLUMNS))]
    found: list[tuple[Cell, ...]] = [
        (
            *(agreement[name] for name in ("line", "ranks", "source", "step_s", "simulated_s")),
            100 * agreement["error"],
        )
        for agreement in agreements(points)
    ]
    if found:
        names = (
            "schedule",
            "ranks",
            "run",
            "step of the run [s]",
            "simulated step [s]",
            "error [%]",
        )
        tables.append(
            Table("agreement", "Simulated beside what ran", names, found, (0, 0, 0, 4, 4, 2))
        )
    verdicts = {True: "kept", False: "not kept", None: "not applicable"}
    rules: list[tuple[Cell, ...]] = [
        (rule.number, rule.title, verdicts[rule.holds], rule.text) for rule in check_rules(points)
    ]
    head = ("rule", "it asks for", "verdict", "why")
    tables.append(Table("rules", "Which claims this picture supports", head, rules, (0,) * 4))
    return tables


def _page(sections: Sequence[RunSection], study: Sequence[Html], notes: Sequence[str]) -> str:
    """Return the whole page as one file that loads nothing else.

    Every text from a run is escaped.
    """
    sources = dict.fromkeys(section.source for section in sections)
    parts = [*study, *(section.html for section in sections)]
    shown_notes = []
    if len(sections) > 1:
        rows: list[tuple[Cell, ...]] = [
            (place, section.title, section.source, *section.overview.values())
            for place, section in enumerate(sections, start=1)
        ]
        columns = ("no.", "run", "source", *sections[0].overview)
        parts.insert(0, Table("overview", "Runs", columns, rows).html())
        shown_notes = [element("p", note, class_="note") for note in notes]
    return filled(
        "page.html",
        title=sections[0].title if len(sections) == 1 else f"{len(sections)} runs",
        style=own_file("report.css"),
        marks=joined(joined([source_mark(source), " "]) for source in sources),
        made=datetime.now(UTC).isoformat(timespec="minutes"),
        notes=joined(shown_notes),
        sections=joined(parts),
        looks=data_element("looks", {"looks": looks_json(), "tracks": TRACKS}),
        script=own_file("report.js"),
    )

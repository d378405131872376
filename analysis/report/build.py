"""Building the page: runs are read one after another, so that only one is in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.io.files import refuse_unwritable
from analysis.io.load import load_trace
from analysis.report.markup import Html
from analysis.report.page import page
from analysis.report.run_section import MAX_EVENTS, RunSection, run_section
from analysis.report.study_section import study_section
from gems.errors import ConfigError
from gems.utils.atomic_io import atomic_write

MAX_RUNS = 16


@dataclass(frozen=True, slots=True)
class Report:
    """The file that was written, and what is in it."""

    path: Path
    size_bytes: int
    num_events: int
    runs: tuple[str, ...]
    notes: tuple[str, ...]


def build_report(runs: Sequence[Path], out: Path) -> Report:
    """Write one page about a run, or about several with a section that compares them.

    Up to 16 runs have sections of their own; of more, the first and the last by their order, spread evenly between. All
    runs are in the table of the study. Runs share the room for events, see `select_events`.

    Raises:
        ConfigError: a run that cannot be read, or a page that cannot be written.
    """
    if not runs:
        raise ConfigError("report", "none", "name at least one run")
    shown = spread(runs, MAX_RUNS)
    notes = [f"{len(shown)} of {len(runs)} runs have a section of their own"] if len(shown) < len(runs) else []
    sections: list[RunSection] = []
    for place, path in enumerate(shown):
        loaded = load_trace(path)
        notes += [f"{path.name}: {note}" for note in loaded.notes]
        sections.append(run_section(place, run_title(path), loaded, MAX_EVENTS // len(shown)))
    study: Html | None = None
    if len(runs) > 1:
        try:
            study = study_section(runs)
        except ConfigError as error:
            notes.append(f"no scaling section: {error}")
    with refuse_unwritable(out):
        with atomic_write(out) as partial:
            partial.write_text(page(sections, study, notes), encoding="utf-8")
        size_bytes = out.stat().st_size
    return Report(out, size_bytes, sum(each.num_events for each in sections), tuple(map(str, runs)), tuple(notes))


def spread(runs: Sequence[Path], count: int) -> list[Path]:
    """Return at most `count` of the runs, evenly spread, the first and the last among them."""
    if len(runs) <= count:
        return list(runs)
    return [runs[round(place * (len(runs) - 1) / (count - 1))] for place in range(count)]


def run_title(path: Path) -> str:
    """Return a run's name: that of its folder, or of a trace file that is not called trace.h5."""
    resolved = path.resolve()
    return resolved.parent.name if resolved.name == "trace.h5" else resolved.name

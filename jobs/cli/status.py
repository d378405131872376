"""Status: one table of runs and studies, from their folders, SLURM's queue and its accounting, as far as there are any."""

from __future__ import annotations

import shutil
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gems.cli.framework import Options, print_json
from gems.errors import ConfigError
from gems.utils.tables import printable
from jobs.status.facts import MISSING
from jobs.status.lookup import Catalogue, catalogue
from jobs.status.run_status import Condition, conditions
from jobs.status.study_record import StudyRecord

HEAD = ("run", "state", "job", "step", "images/s", "loss", "beat", "note")
RIGHT = ("step", "images/s", "loss", "beat")
GAP = "  "
MIN_WATCH_S = 1.0
MIN_NOTE_CHARS = 30
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True, slots=True)
class StudyCondition:
    """A study as it stands: its points in order, None where a point has no run folder yet."""

    record: StudyRecord
    points: tuple[tuple[str, Condition | None], ...]

    @property
    def counts(self) -> Counter[str]:
        """How many points are in each state."""
        return Counter(MISSING if found is None else found.state for _, found in self.points)

    @property
    def is_active(self) -> bool:
        """Whether a point waits or runs, or the study's command is there and will start more."""
        return any(found is not None and found.is_active for _, found in self.points) or bool(self.record.runs_here())

    @property
    def state(self) -> str:
        """The state of the whole."""
        counts = self.counts
        if self.is_active:
            return "running"
        if len(counts) == 1:
            return next(iter(counts))
        return next((state for state in ("failed", "lost", "cancelled") if counts[state]), "incomplete")

    def to_dict(self) -> dict[str, Any]:
        """Return the study and its points for a program."""
        rows = [
            {"point": label, **(found.to_dict() if found is not None else {"state": MISSING})}
            for label, found in self.points
        ]
        return {"name": self.record.name, "state": self.state, "counts": dict(self.counts), "points": rows}


@dataclass(frozen=True, slots=True)
class Overview:
    """All that one look has found."""

    runs: tuple[Condition, ...]
    studies: tuple[StudyCondition, ...]
    troubles: tuple[str, ...]

    @property
    def is_active(self) -> bool:
        """Whether anything waits or goes on."""
        return any(run.is_active for run in self.runs) or any(study.is_active for study in self.studies)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole for a program."""
        return {
            "runs": [run.to_dict() for run in self.runs],
            "studies": [study.to_dict() for study in self.studies],
            "not_asked": list(self.troubles),
        }


def status(words: Sequence[str], options: Options) -> int:
    """Run `python -m jobs status [RUN_OR_STUDY ...]`; --watch S shows the table again every S s until all have ended.

    Raises:
        ConfigError: no such run or study, or an interval that is none.
    """
    every_s = _interval_s(options)
    found = catalogue(words)
    pause = threading.Event()
    try:
        while True:
            seen = look(found)
            _show(seen, options, is_watching=every_s is not None)
            if every_s is None or not seen.is_active:
                return 0
            pause.wait(every_s)
            found = catalogue(words)
    except KeyboardInterrupt:
        if every_s is None:
            raise
        return 0  # that is how one ends watching


def look(found: Catalogue) -> Overview:
    """Check at the runs and studies of a catalogue, with one question to SLURM for all of them."""
    seen = conditions(found.folders())
    by_path = {run.folder.path: run for run in seen.runs}
    studies = [
        StudyCondition(study, tuple((label, by_path.get(folder.path)) for label, folder in study.points()))
        for study in found.studies
    ]
    return Overview(tuple(by_path[folder.path] for folder in found.runs), tuple(studies), seen.troubles)


def table(seen: Overview, *, with_points: bool = False, width: int = 0) -> str:
    """Return the table; lines are cut at `width` characters where it is given, and say below what is guessed."""
    rows: list[tuple[str, ...]] = [HEAD]
    rows += [_row(run, run.folder.path.name) for run in seen.runs]
    for study in seen.studies:
        counts = ", ".join(f"{number} {state}" for state, number in sorted(study.counts.items()))
        rows.append((study.record.name, study.state, "", "", "", "", "", f"study of {len(study.points)}: {counts}"))
        for label, found in study.points if with_points else ():
            name = f"  {label}"
            rows.append(_row(found, name) if found is not None else (name, MISSING, "", "", "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    widths[-1] = max(MIN_NOTE_CHARS, width - sum(widths[:-1]) - len(GAP) * len(widths[:-1])) if width else 0
    return "\n".join([*(_line(row, widths, is_cut=bool(width)) for row in rows), *_footnotes(seen)])


def when(start: datetime) -> str:
    """Describe an estimated start in this machine's time, without the date on the same day."""
    local, today = start.astimezone(), datetime.now(UTC).astimezone().date()
    return f"{local:%H:%M}" if local.date() == today else f"{local:%Y-%m-%d %H:%M}"


def _row(run: Condition, name: str) -> tuple[str, ...]:
    facts = run.facts
    step = "" if facts.step is None else f"{facts.step}/{'?' if facts.steps is None else facts.steps}"
    note = run.note
    if run.state == "pending" and run.start_utc is not None:
        note = f"{note}, starts about {when(run.start_utc)}".removeprefix(", ")
    return (
        printable(name),
        f"{run.state}?" if run.is_guess else run.state,
        facts.job_id or "",
        f"~{step}" if "step" in facts.sources else step,
        "" if facts.images_per_s is None else f"{facts.images_per_s:.4g}",
        "" if facts.loss is None else f"{facts.loss:.4f}",
        "" if run.age_s is None else f"{run.age_s:.0f} s",
        printable(note),
    )


def _line(row: Sequence[str], widths: Sequence[int], *, is_cut: bool) -> str:
    cells = [
        text.rjust(width) if head in RIGHT else text.ljust(width)
        for head, text, width in zip(HEAD, row, widths, strict=True)
    ]
    if is_cut and len(row[-1]) > widths[-1]:
        cells[-1] = row[-1][: widths[-1] - 3] + "..."
    return GAP.join(cells).rstrip()


def _footnotes(seen: Overview) -> list[str]:
    """Report where a column comes from that was guessed, and why."""
    runs = [*seen.runs, *(found for study in seen.studies for _, found in study.points if found is not None)]
    notes = [f"no answer: {trouble}" for trouble in seen.troubles]
    guessed = sorted({run.source for run in runs if run.is_guess})
    if guessed:
        notes.append(f"?  the state is judged by {' and '.join(guessed)} alone")
    steps = sorted({run.facts.sources["step"] for run in runs if "step" in run.facts.sources})
    if steps:
        notes.append(f"~  the step is from {' and '.join(steps)}, for want of progress.json")
    return notes


def _show(seen: Overview, options: Options, *, is_watching: bool) -> None:
    if options.json:
        print_json(seen.to_dict())
        sys.stdout.flush()
        return
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 0
    head = f"{CLEAR if is_terminal else ''}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n" if is_watching else ""
    is_empty = not seen.runs and not seen.studies
    text = "no runs here" if is_empty else table(seen, with_points="-v" in options.flags, width=width)
    print(head + text, flush=True)


def _interval_s(options: Options) -> float | None:
    text = options.chosen.get("--watch")
    if text is None:
        return None
    try:
        every_s = float(text)
    except ValueError:
        every_s = 0.0
    if not MIN_WATCH_S <= every_s <= threading.TIMEOUT_MAX:
        raise ConfigError("--watch", text, f"must be {MIN_WATCH_S:g} or more seconds", "SLURM's daemons serve all")
    return every_s

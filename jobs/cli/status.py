"""`gems-jobs status`: one table of runs and studies, from their folders and SLURM."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

from gems.cli.framework import Options, print_json
from gems.errors import ConfigError
from gems.utils.tables import RIGHT, printable, table, terminal_width, wrapped
from jobs.status.lookup import Overview, find_runs, overview
from jobs.status.run_status import RunStatus, format_start

COLUMNS = {
    "run": "",
    "state": "",
    "job": "",
    "step": RIGHT,
    "images/s": RIGHT,
    "loss": RIGHT,
    "beat": RIGHT,
    "note": "",
}
MIN_WATCH_S = 1.0
INDENT = 4
CLEAR = "\x1b[H\x1b[2J"


def status(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs status [RUN_OR_STUDY ...]`.

    --watch S shows the table again every S s until all have ended.

    Raises:
        ConfigError: no such run or study, or an interval that is none.
    """
    every_s = _interval_s(options)
    found = find_runs(words)
    pause = threading.Event()
    try:
        while True:
            seen = overview(found)
            _show(seen, options, is_watching=every_s is not None)
            if every_s is None or not seen.is_active:
                return 0
            pause.wait(every_s)
            found = find_runs(words)
    except KeyboardInterrupt:
        if every_s is None:
            raise
        return 0  # that is how one ends watching


def status_table(seen: Overview, *, with_points: bool = False, width: int = 0) -> str:
    """Return the table with notes on what is guessed; `width` limits its lines unless it is 0."""
    rows = [_row(run, run.folder.path.name) for run in seen.runs]
    for study in seen.studies:
        counts = ", ".join(f"{number} {state}" for state, number in sorted(study.counts.items()))
        rows.append(
            (
                study.record.name,
                study.state,
                "",
                "",
                "",
                "",
                "",
                f"study of {len(study.points)}: {counts}",
            )
        )
        for label, run in study.points if with_points else ():
            rows.append(_row(run, f"  {label}"))
    notes = [f"no answer: {error}" for error in seen.errors]
    runs = seen.all_runs()
    if guessed := sorted({run.source for run in runs if run.is_guess}):
        notes.append(f"?  the state is judged by {' and '.join(guessed)} alone")
    if steps := sorted({run.sources["step"] for run in runs if "step" in run.sources}):
        notes.append(f"~  the step is from {' and '.join(steps)}, for lack of progress.json")
    return "\n".join([_narrow(rows, width) or table(COLUMNS, rows, width=width), *notes])


def _narrow(rows: Sequence[tuple[str, ...]], width: int) -> str | None:
    """Return a table whose names and notes have lines of their own.

    None if it fits with them beside the rest.
    """
    if not width or max(map(len, table(COLUMNS, rows, width=width).splitlines())) <= width:
        return None
    columns = {name: spec for name, spec in COLUMNS.items() if name not in ("run", "note")}
    head, *lines = table(columns, [row[1:-1] for row in rows], indent=INDENT).splitlines()
    shown = ["run", head]
    for row, line in zip(rows, lines, strict=True):
        note = [wrapped(printable(row[-1]), " " * INDENT, width)] if row[-1] else []
        shown += [printable(row[0]), line, *note]
    return "\n".join(shown)


def _row(run: RunStatus, name: str) -> tuple[str, ...]:
    step = "" if run.step is None else f"{run.step}/{'?' if run.steps is None else run.steps}"
    note = run.note
    if run.state == "pending" and run.start_utc is not None:
        note = f"{note}, starts about {format_start(run.start_utc)}".removeprefix(", ")
    note = "; ".join(text for text in (note, run.error, run.layout_note) if text)
    rate = "" if run.images_per_s is None else f"{run.images_per_s:.4g}"
    loss = "" if run.loss is None else f"{run.loss:.4f}"
    age = "" if run.age_s is None else f"{run.age_s:.0f} s"
    state = f"{run.state}?" if run.is_guess else run.state
    step = f"~{step}" if "step" in run.sources else step
    return name, state, run.job_id or "", step, rate, loss, age, note


def _show(seen: Overview, options: Options, *, is_watching: bool) -> None:
    if options.json:
        print_json(seen.to_dict())
        sys.stdout.flush()
        return
    is_terminal = sys.stdout.isatty()
    width = terminal_width()
    head = (
        f"{CLEAR if is_terminal else ''}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n"
        if is_watching
        else ""
    )
    has_any = seen.runs or seen.studies
    text = (
        status_table(seen, with_points="-v" in options.flags, width=width)
        if has_any
        else "no runs here"
    )
    print(head + text, flush=True)


def _interval_s(options: Options) -> float | None:
    text = options.chosen.get("--watch")
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        if MIN_WATCH_S <= (every_s := float(text)) <= threading.TIMEOUT_MAX:
            return every_s
    allowed = f"must be {MIN_WATCH_S:g} or more seconds"
    raise ConfigError("--watch", text, allowed, "all users share SLURM's daemons")

"""`gems-jobs status`: one table of runs and studies, from their folders and SLURM."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from gems.cli.framework import Options, print_json
from gems.errors import ConfigError
from gems.utils.tables import RIGHT, printable, table, terminal_width, wrapped
from jobs.status.lookup import Overview, find_runs, overview
from jobs.status.run_status import RunStatus, describe_states

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

    --watch S repeats the table every S seconds until all have ended.

    Raises:
        ConfigError: A run or study does not exist, or the interval is invalid.
    """
    every_s = _interval_s(options)
    catalogue = find_runs(words)
    pause = threading.Event()
    try:
        while True:
            seen = overview(catalogue)
            _show(seen, options, is_watching=every_s is not None)
            if every_s is None or not seen.is_active:
                return 0
            pause.wait(every_s)
            catalogue = find_runs(words)
    except KeyboardInterrupt:
        if every_s is None:
            raise
        return 0  # an interrupt is the normal end of --watch


def status_table(seen: Overview, *, with_points: bool = False, width: int = 0) -> str:
    """Return the table with notes on guesses; `width` limits its lines unless it is 0."""
    rows = [_row(run, run.folder.path.name) for run in seen.runs]
    for study in seen.studies:
        counts = describe_states(run.state for _, run in study.points)
        note = f"study of {len(study.points)}: {counts}"
        rows.append({"run": study.record.name, "state": study.state, "note": note})
        rows += [_row(run, f"  {label}") for label, run in study.points if with_points]
    notes = [f"no answer: {error}" for error in seen.errors]
    runs = seen.all_runs()
    if guessed := sorted({run.source for run in runs if run.is_guess}):
        notes.append(f"?  the state is judged by {' and '.join(guessed)} alone")
    if steps := sorted({run.sources["step"] for run in runs if "step" in run.sources}):
        notes.append(f"~  the step is from {' and '.join(steps)}, for lack of progress.json")
    return "\n".join([_table(rows, width), *notes])


def _table(rows: Sequence[Mapping[str, str]], width: int) -> str:
    """Return a table of rows; if it is wider than `width`, put names and notes on own lines."""
    text = table(COLUMNS, _cells(COLUMNS, rows), width=width)
    if not width or max(map(len, text.splitlines())) <= width:
        return text
    columns = {name: form for name, form in COLUMNS.items() if name not in ("run", "note")}
    head, *lines = table(columns, _cells(columns, rows), indent=INDENT).splitlines()
    shown = ["run", head]
    for row, line in zip(rows, lines, strict=True):
        note = [wrapped(printable(row["note"]), " " * INDENT, width)] if row["note"] else []
        shown += [printable(row["run"]), line, *note]
    return "\n".join(shown)


def _cells(columns: Iterable[str], rows: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    return [tuple(row.get(name, "") for name in columns) for row in rows]


def _row(run: RunStatus, name: str) -> dict[str, str]:
    """Return the cells of a run by column; those without a value are left out."""
    row = {
        "run": name,
        "state": f"{run.state}?" if run.is_guess else run.state,
        "job": run.job_id or "",
        "note": "; ".join(filter(None, (run.reason, run.error, run.layout_note))),
    }
    if run.step is not None:
        mark = "~" if "step" in run.sources else ""
        row["step"] = f"{mark}{run.step}/{'?' if run.steps is None else run.steps}"
    if run.images_per_s is not None:
        row["images/s"] = f"{run.images_per_s:.4g}"
    if run.loss is not None:
        row["loss"] = f"{run.loss:.4f}"
    if run.age_s is not None:
        row["beat"] = f"{run.age_s:.0f} s"
    return row


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

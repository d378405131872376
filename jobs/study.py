"""A study: its points run one after another, those that are finished are left alone, and all are drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gems.cli import Options, print_json
from gems.compose import options_of
from gems.errors import ConfigError, GemsError, one_of
from gems.runfolder import RunFolder
from jobs.blame import SIGNAL_BASE
from jobs.points import GROUP, Point, points_of, read_study, study_name
from jobs.queue import is_queued
from jobs.submit import DRY_RUN, start

FINISHED = "finished"
GOING_ON = ("submitted", "running")


def study(words: Sequence[str], options: Options) -> int:
    """Runs `python -m jobs study study=NAME [key=value ...]`; the overrides go to every point.

    Gives the worst of the exit codes: of the points that ran, and of the drawing. A point's state is what its
    status.json says; those missing or failed run. With --dry-run nothing runs, and the points are printed.

    Raises:
        ConfigError: no such study, or a point that cannot be composed; then none has run.
    """
    chosen = [word for word in words if word.startswith(f"{GROUP}=")]
    if len(chosen) != 1:
        raise ConfigError(
            GROUP, " ".join(chosen) or "none", "give one study: " + one_of(options_of(GROUP)), "study=NAME"
        )
    name = chosen[0].partition("=")[2]
    points = points_of(read_study(name), study_name(name), [word for word in words if word not in chosen])
    states = [state_of(point.folder) for point in points]
    if DRY_RUN in options.flags:
        _show(points, states, options, study=study_name(name))
        return 0
    is_due = [state not in (FINISHED, *GOING_ON) for state in states]
    say(f"study {study_name(name)}: {_counts(states)}; {sum(is_due) or 'nothing'} to run")
    code = 0
    for number, point in enumerate(points):
        if is_due[number]:
            code = max(code, run_point(point, number + 1, len(points)))
            states[number] = state_of(point.folder)
        if code > SIGNAL_BASE:
            break  # someone wants an end of it
    if not options.json:
        _show(points, states, options)
    drawn: dict[str, Any] | None = None
    if FINISHED in states:
        folders = [
            point.folder.path for point, state in zip(points, states, strict=True) if state == FINISHED
        ]
        out = Path(points[0].spec.runs_dir).resolve() / study_name(name)
        drawing_code, drawn = draw(folders, out, as_json=options.json)
        code = max(code, drawing_code)
    if options.json:
        _show(points, states, options, study=study_name(name), num_run=sum(is_due), scaling=drawn)
    return code


def state_of(folder: RunFolder) -> str:
    """Gives the state of a point by its status.json: missing, prepared, submitted, running, finished or failed.

    A run whose job has left the queue, or whose process has gone, is failed; so is one that was not collected.

    Raises:
        ConfigError: the file is no JSON.
    """
    status = folder.read_status()
    state = str(status.get("state", "missing"))
    if state == FINISHED:
        return "failed" if status.get("exit_code") else FINISHED
    if state not in GOING_ON:
        return state
    if status.get("job_id") is not None:
        return "failed" if is_queued(str(status["job_id"])) is False else state
    pid, is_here = status.get("pid"), status.get("host") == os.uname().nodename
    return state if is_here and pid != os.getpid() and Path(f"/proc/{pid}").exists() else "failed"


def run_point(point: Point, number: int, num_points: int) -> int:
    """Runs one point and gives its exit code; what cannot start is said in one line."""
    say(f"point {number} of {num_points}: {point.label}, {point.spec.world_size} ranks")
    try:
        code = start(point.spec)
    except GemsError as error:
        say(f"point {number} of {num_points} ({point.label}) cannot start: {error}")
        return error.exit_code
    if code:
        say(f"point {number} of {num_points} ({point.label}) has failed: {point.folder.path}")
    return code


def draw(folders: Iterable[Path], out: Path, *, as_json: bool) -> tuple[int, dict[str, Any] | None]:
    """Draws the scaling of finished runs into the folder `out`, in a process of its own that loads plotting.

    Gives its exit code, and with `as_json` the object that it printed.
    """
    sys.stdout.flush()
    words = [sys.executable, "-m", "analysis", "scaling", *map(str, folders), "--out", str(out)]
    if not as_json:
        return subprocess.run(words, stdin=subprocess.DEVNULL).returncode, None
    ended = subprocess.run([*words, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    return ended.returncode, json.loads(ended.stdout) if ended.returncode == 0 else None


def say(text: str) -> None:
    """Says how the study goes on, on stderr."""
    print(f"jobs: {text}", file=sys.stderr, flush=True)


def _counts(states: Sequence[str]) -> str:
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    return f"{len(states)} points ({counts})" if states else "no points"


def _show(points: Sequence[Point], states: Sequence[str], options: Options, **more: Any) -> None:
    """Prints the points with their states and run folders."""
    if options.json:
        rows = [
            {
                "point": point.label,
                "state": state,
                "machine": point.spec.machine.kind,
                "ranks": point.spec.world_size,
                "run_folder": str(point.folder.path),
            }
            for point, state in zip(points, states, strict=True)
        ]
        print_json({**more, "points": rows})
        return
    width = max((len(point.label) for point in points), default=0)
    for number, (point, state) in enumerate(zip(points, states, strict=True), 1):
        print(f"{number:3}  {state:<9}  {point.label:<{width}}  {point.folder.path}")

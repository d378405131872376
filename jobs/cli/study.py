"""`gems-jobs study`: run the unfinished points of a study, here or as jobs, and draw all points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.overrides import options_of
from gems.errors import ConfigError, one_of
from gems.runs.folder import RunFolder
from gems.utils.run_module import RUN_MODULE
from gems.utils.tables import RIGHT, table
from jobs.batch.output import report
from jobs.batch.preset_limits import is_on_site
from jobs.batch.resources import job_spec
from jobs.launch.own_job import CANCELLED_CODE
from jobs.preflight.checks import show, site_checks
from jobs.preflight.cost import DRY_RUN, YES, describe_cost, is_confirmed
from jobs.schedulers.scheduler import scheduler_for
from jobs.status.cancellation import cancel_all
from jobs.status.lookup import StudyRecord, find_named
from jobs.status.run_status import ACTIVE, RunStatus, describe_states, run_statuses
from jobs.studies.points import GROUP, Point, compose_points, read_study, study_name
from jobs.studies.runner import HELD_BACK, StudyRunner

FINISHED = "finished"
WAIT = "--wait"
STOP = "--stop"
PointRow = tuple[Point, RunStatus, str]  # a point, its run, and its state


def study(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs study study=NAME [key=value ...]`; the overrides apply to every point.

    Run the points that are missing or failed. As many jobs are submitted as the queue accepts; the
    next call submits the others, and --wait waits until all have ended. --dry-run only prints the
    points; --stop cancels the study, as `gems-jobs cancel` does. If all points together cost more
    than cluster.confirm_above_gpu_hours, they must be confirmed. Return the worst exit code of the
    points that have run and of the drawing.

    Raises:
        ConfigError: The study does not exist, a point cannot be composed, or nobody can confirm;
            no point has run.
    """
    chosen = [word for word in words if word.startswith(f"{GROUP}=")]
    if len(chosen) != 1:
        allowed = "give one study: " + one_of(options_of(GROUP))
        raise ConfigError(GROUP, " ".join(chosen) or "none", allowed, "study=NAME")
    spec_name = chosen[0].partition("=")[2]
    name = study_name(spec_name)
    points = compose_points(
        read_study(spec_name), name, [word for word in words if word not in chosen]
    )
    record = StudyRecord(Path(points[0].spec.runs_dir).resolve() / name)
    if STOP in options.flags:
        return cancel_all(
            find_named([f"runs_dir={record.path.parent}", name], "cancel"), as_json=options.json
        )
    seen = _with_states(points)
    if DRY_RUN in options.flags:
        _show(seen, options, study=name)
        if not options.json:
            _show_jobs([point for point, _, state in seen if is_due(state)])
        return 0
    due = [point for point, _, state in seen if is_due(state)]
    if not is_confirmed([job_spec(point.spec) for point in due], assume_yes=YES in options.flags):
        report("nothing is submitted")
        return 1
    listed = describe_states(state for _, _, state in seen)
    report(f"study {name}: {len(seen)} points ({listed}); {len(due) or 'nothing'} to run")
    record.begin([(point.label, point.folder.path) for point in points])
    runner = StudyRunner(points, record, due)
    code = runner.run()
    if WAIT in options.flags:
        code = max(code, runner.wait())
    if record.is_cancelled:
        code = max(code, CANCELLED_CODE)
    if runner.waiting:
        more = f"{len(runner.waiting)} points wait for the next call (or {WAIT})"
        report(f"study {name}: the queue is full; {more}")
    return max(code, _finish(points, runner, record, options))


def _finish(
    points: Sequence[Point], runner: StudyRunner, record: StudyRecord, options: Options
) -> int:
    """Show the points, and draw those that have finished; return the drawing's exit code."""
    seen = [
        (point, run, HELD_BACK if point in runner.waiting else state)
        for point, run, state in _with_states(points)
    ]
    if not options.json:
        _show(seen, options)
    code = 0
    drawn: dict[str, Any] | None = None
    finished = [
        point.folder.path
        for point, _, state in seen
        if state == FINISHED and not point.spec.machine.is_probe
    ]
    if finished and not record.is_cancelled:
        code, drawn = draw(finished, record.path, as_json=options.json)
    if options.json:
        _show(seen, options, study=record.name, num_run=runner.num_due, scaling=drawn)
    return code


def _with_states(points: Sequence[Point]) -> list[PointRow]:
    """Return the points with their runs, by one squeue for all jobs, and their states."""
    runs = run_statuses([point.folder for point in points]).runs
    return [(point, run, point_state(run)) for point, run in zip(points, runs, strict=True)]


def _show_jobs(due: Sequence[Point]) -> None:
    """Show on stderr the cost of some points' jobs, and the first one's script and preflight."""
    jobs = [(point.spec, job) for point in due if (job := job_spec(point.spec)).is_batch]
    if not jobs:
        return
    spec, job = jobs[0]
    script = scheduler_for(job.cluster).script(job, RunFolder.of(spec))
    print(script, end="", file=sys.stderr, flush=True)
    report(
        f"the script of the first of {len(jobs)} points, at most"
        f" {describe_cost([job for _, job in jobs])}"
    )
    here = is_on_site(job.cluster)
    show(site_checks(job, script, spec.machine.host_bytes, here=here))


def point_state(run: RunStatus) -> str:
    """Return the state of a point's run.

    A run has failed if its job or process ended without a record, or if it is not a job, is on
    another host, and shows no sign of life.
    """
    status = run.status
    is_own = status.get("state") == "running" and status.get("pid") == os.getpid()
    is_silent = run.state == "stalled" and run.is_guess and run.job_id is None
    return "failed" if run.state == "lost" or is_own or is_silent else run.state


def is_due(state: str) -> bool:
    """Return whether a point in this state must run."""
    return state != FINISHED and state not in ACTIVE


def draw(folders: Iterable[Path], out: Path, *, as_json: bool) -> tuple[int, dict[str, Any] | None]:
    """Draw the scaling of finished runs into the folder `out`, in a child that loads plotting.

    Return its exit code, and with `as_json` the object that it printed.
    """
    sys.stdout.flush()
    words = [
        sys.executable,
        *RUN_MODULE,
        "analysis",
        "scaling",
        *map(str, folders),
        "--out",
        str(out),
    ]
    if not as_json:
        return subprocess.run(words, stdin=subprocess.DEVNULL).returncode, None
    ended = subprocess.run(
        [*words, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    return ended.returncode, json.loads(ended.stdout) if ended.returncode == 0 else None


def _show(rows: Sequence[PointRow], options: Options, **more: Any) -> None:
    """Print the points with their states, last jobs and run folders."""
    if options.json:
        listed = [
            {
                "point": point.label,
                "state": state,
                "machine": point.spec.machine.kind,
                "ranks": point.spec.world_size,
                "job_id": run.job_id,
                "run_folder": str(point.folder.path),
            }
            for point, run, state in rows
        ]
        print_json({**more, "points": listed})
        return
    job_column = {"job": RIGHT} if any(run.job_id for _, run, _ in rows) else {}
    cells = [
        (number, state, *([run.job_id] if job_column else []), point.label, str(point.folder.path))
        for number, (point, run, state) in enumerate(rows, 1)
    ]
    print(
        table({"point": "d", "state": "", **job_column, "overrides": "", "run folder": ""}, cells)
    )

"""Cancel runs and studies: `python -m jobs cancel`.

SLURM's jobs end by one scancel, a run of this machine by its launching process, and a study as a whole.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gems.cli.framework import Options, print_json
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.lookup import run_name
from gems.utils.atomic_io import write_json
from gems.utils.process_tree import end_stranger
from gems.utils.tables import printable
from jobs.preflight.cost import YES, ask_yes
from jobs.slurm.jobs import cancel_jobs
from jobs.status.lookup import Catalogue, find_named
from jobs.status.overview import Overview, overview
from jobs.status.run_status import UNFINISHED, RunStatus, is_alive_here, read_status, run_statuses
from jobs.status.study_record import StudyRecord, requested_by

GRACE_S = 20.0  # a launching process gives its ranks some seconds, and then writes how they ended
END_LIMIT_S = 60.0
COMMAND_LIMIT_S = 60.0  # a study's command may be in the middle of a submission
POLL_S = 1.0
CANCELLED, ENDING, LEFT, REFUSED = "cancelled", "ending", "left", "refused"


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What became of a run: cancelled, still ending, left as it had ended, or refused."""

    folder: RunFolder
    outcome: str
    why: str


def cancel(words: Sequence[str], options: Options) -> int:
    """Run `python -m jobs cancel RUN_OR_STUDY ...`; return 1 if something was refused or has not ended yet.

    A cancelled study starts no more points: its command looks for the mark before each.

    Raises:
        ConfigError: nothing named, no such run or study, or nobody there to confirm.
    """
    found = find_named(words, "cancel")
    seen = overview(found)
    needs_yes = seen.is_active or any(study.record.is_running_here() is None for study in seen.studies)
    if needs_yes and YES not in options.flags and not _is_confirmed(seen):
        print("jobs: nothing is cancelled", file=sys.stderr)
        return 1
    notes = [note for study in found.studies if (note := _stop_study(study))]
    results = _cancel_runs(found)
    if options.json:
        rows = [
            {
                "name": each.folder.path.name,
                "run_folder": str(each.folder.path),
                "outcome": each.outcome,
                "why": each.why,
            }
            for each in results
        ]
        print_json({"runs": rows, "studies": [study.name for study in found.studies], "notes": notes})
    else:
        lines = [printable(f"{each.folder.path.name}: {each.outcome}, {each.why}") for each in results]
        print("\n".join([*lines, *notes]))
    return 1 if any(each.outcome in (REFUSED, ENDING) for each in results) else 0


def _is_confirmed(seen: Overview) -> bool:
    """Show what would end, and ask."""
    active = [run for run in seen.all_runs() if run.is_active]
    if not sys.stdin.isatty():
        raise ConfigError("cancel", len(active), "must be confirmed, and stdin is no terminal", f"add {YES}")
    for run in active:
        job = f", job {run.recorded.job_id}" if run.recorded.job_id else ""
        print(printable(f"jobs: {run.folder.path.name} is {run.state}{job}"), file=sys.stderr)
    for study in seen.studies:
        print(printable(f"jobs: study {study.record.name} starts no more points"), file=sys.stderr)
    return ask_yes("cancel?")


def _stop_study(study: StudyRecord) -> str | None:
    """Mark a study as cancelled, and wait until its command starts no more points.

    Return a note if that is not known.
    """
    study.mark_cancelled()
    pause, deadline_s = threading.Event(), time.monotonic() + COMMAND_LIMIT_S
    while study.is_running_here() and not _runs_point_itself(study):
        if time.monotonic() > deadline_s:
            return f"study {study.name}: its command (process {study.read()['pid']}) stops before its next point"
        pause.wait(POLL_S / 5)
    if study.is_running_here() is None:
        return f"study {study.name}: its command on {study.read().get('host')} stops before its next point"
    return None


def _runs_point_itself(study: StudyRecord) -> bool:
    """Return whether the study's own process is the launching one of a point."""
    pid = study.read().get("pid")
    statuses = [read_status(folder) for _, folder in study.points() if folder.path.is_dir()]
    return any(status.get("state") == "running" and status.get("pid") == pid for status in statuses)


def _cancel_runs(found: Catalogue) -> list[CancelResult]:
    """Cancel what is active, and return what became of each run."""
    results: list[CancelResult] = []
    jobs: list[RunStatus] = []
    here: list[RunStatus] = []
    for run in run_statuses(found.folders()).runs:
        if not run.is_active:
            results.append(CancelResult(run.folder, LEFT, f"it is {run.state}"))
        elif (refusal := _refusal(run) or _mark(run.folder)) is not None:
            results.append(CancelResult(run.folder, REFUSED, refusal))
        else:
            (jobs if run.recorded.job_id is not None else here).append(run)
    error = cancel_jobs([run.recorded.job_id for run in jobs if run.recorded.job_id]) if jobs else None
    results += [_end_here(run) for run in here]
    return results + _await_jobs(jobs, error)


def _mark(folder: RunFolder) -> str | None:
    """Write the mark by which a run that is stopped knows why; return why it cannot be written."""
    try:
        write_json(folder.cancelled_json, requested_by())
    except OSError as error:
        return f"cannot write to its folder ({error.strerror})"
    return None


def _refusal(run: RunStatus) -> str | None:
    """Return why an active run cannot be cancelled from here, or None."""
    recorded, status = run.recorded, run.recorded.status
    if recorded.job_id is not None:
        if run.job_name is not None and run.job_name != run_name(run.folder.path).strip():
            return (
                f"job {recorded.job_id} is called {run.job_name!r}: `scancel {recorded.job_id}` if you mean all of it"
            )
        return None
    if "job_id" in status:
        return f"its job_id {status['job_id']!r} is no job's number"
    if recorded.state == "prepared":
        return "it was started by hand: end it there"
    if not is_alive_here(status):
        return f"it runs on {status.get('host')}: call this there"
    if not status.get("pid_started"):
        return f"its status.json does not tell when process {status.get('pid')} started"
    return None


def _end_here(run: RunStatus) -> CancelResult:
    """End a run of this machine by its launching process, which ends the ranks and records that in status.json."""
    pid, started = run.recorded.status["pid"], str(run.recorded.status["pid_started"])
    try:
        has_ended = end_stranger(pid, started, GRACE_S, lambda: run.folder.read_status().get("state") != "running")
    except PermissionError:
        run.folder.cancelled_json.unlink(missing_ok=True)
        return CancelResult(run.folder, REFUSED, f"process {pid} belongs to somebody else")
    if not has_ended:
        return CancelResult(run.folder, ENDING, f"process {pid} is still there")
    return _record_end(run, f"process {pid}")


def _await_jobs(jobs: Sequence[RunStatus], error: str | None) -> list[CancelResult]:
    """Wait until SLURM has ended the jobs, or the runs have recorded how they ended."""
    pause, deadline_s = threading.Event(), time.monotonic() + END_LIMIT_S
    waiting = {run.folder.path: run for run in jobs}
    results = []
    while waiting:
        for now in run_statuses([run.folder for run in waiting.values()]).runs:
            is_unknown = now.state == "submitted" and now.is_guess and error is None
            if not now.is_active or is_unknown:
                run = waiting.pop(now.folder.path)
                results.append(_record_end(run, f"job {run.recorded.job_id}"))
        if error is not None or time.monotonic() > deadline_s:
            break
        pause.wait(POLL_S if waiting else 0)
    for run in waiting.values():
        if error is not None:
            run.folder.cancelled_json.unlink(missing_ok=True)
        why = f"job {run.recorded.job_id}: {error or 'SLURM is ending it, and status.json will tell'}"
        results.append(CancelResult(run.folder, ENDING if error is None else REFUSED, why))
    return results


def _record_end(run: RunStatus, what: str) -> CancelResult:
    """Record the end of a run that has not done so itself: its process was killed, or its job never started."""
    status = run.folder.read_status()
    if status.get("state") in UNFINISHED or status == run.recorded.status:
        more = {key: value for key, value in status.items() if key not in ("state", "updated_utc")}
        run.folder.write_status("cancelled", **{**more, "cause": "cancelled"})
    elif status.get("state") != CANCELLED:
        run.folder.cancelled_json.unlink(missing_ok=True)
        return CancelResult(run.folder, LEFT, f"it is {status.get('state')}")
    return CancelResult(run.folder, CANCELLED, what)

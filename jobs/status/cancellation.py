"""Cancel runs and studies.

Jobs are cancelled through their batch system, a run of this machine through its launching process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from gems.cli.framework import print_json
from gems.runs.folder import RunFolder
from gems.runs.lookup import run_name
from gems.runs.owner import SUBMITTING, UNFINISHED, is_alive_here
from gems.utils.atomic_io import write_json
from gems.utils.process_tree import end_stranger
from gems.utils.tables import printable
from jobs.schedulers.scheduler import cancel_jobs, system_of, title
from jobs.status.job_record import read_chain
from jobs.status.lookup import Catalogue, StudyRecord, requested_by
from jobs.status.run_status import RunStatus, read_status, run_statuses

# a launching process allows its ranks some seconds, and then records how they ended
GRACE_S = 20.0
END_LIMIT_S = 60.0
COMMAND_LIMIT_S = 60.0  # a study's command may be in the middle of a submission
POLL_S = 1.0
CANCELLED = "cancelled"
ENDING = "ending"
LEFT = "left"
REFUSED = "refused"
Result = tuple[RunFolder, str, str]  # a run, its result, and the reason


def cancel_all(catalogue: Catalogue, *, as_json: bool) -> int:
    """Cancel everything that is active and print the result of each run.

    Return 1 if a cancellation was refused or a run has not ended yet. A cancelled study starts no
    more points, because its command checks for the mark before each point.
    """
    notes = [note for study in catalogue.studies if (note := _stop_study(study))]
    results: list[Result] = []
    jobs: list[RunStatus] = []
    here: list[RunStatus] = []
    points = [
        folder
        for study in catalogue.studies
        for _, folder in study.points()
        if folder.path.is_dir()
    ]
    for run in run_statuses(
        list({folder.path: folder for folder in (*catalogue.runs, *points)}.values())
    ).runs:
        if not run.is_active:
            results.append((run.folder, LEFT, f"it is {run.state}"))
        elif (refusal := _refusal(run) or _mark(run.folder)) is not None:
            results.append((run.folder, REFUSED, refusal))
        else:
            (jobs if run.job_id is not None else here).append(run)
    job_ids = [job_id for run in jobs for job_id in (run.job_id, *read_chain(run.folder)) if job_id]
    error = cancel_jobs(list(dict.fromkeys(job_ids))) if jobs else None
    results += [*map(_end_here, here), *_await_jobs(jobs, error)]
    if as_json:
        rows = [
            {
                "name": folder.path.name,
                "run_folder": str(folder.path),
                "outcome": outcome,
                "why": why,
            }
            for folder, outcome, why in results
        ]
        print_json(
            {"runs": rows, "studies": [study.name for study in catalogue.studies], "notes": notes}
        )
    else:
        lines = [
            printable(f"{folder.path.name}: {outcome}, {why}") for folder, outcome, why in results
        ]
        print("\n".join([*lines, *notes]))
    return int(any(outcome in (REFUSED, ENDING) for _, outcome, _ in results))


def _stop_study(study: StudyRecord) -> str | None:
    """Mark a study as cancelled, and wait until its command starts no more points.

    Return a note if this is unknown.
    """
    study.mark_cancelled()
    pause = threading.Event()
    deadline_s = time.monotonic() + COMMAND_LIMIT_S
    while study.is_running_here():
        pid = study.read().get("pid")
        statuses = [read_status(folder) for _, folder in study.points() if folder.path.is_dir()]
        if any(
            status.get("state") == "running" and status.get("pid") == pid for status in statuses
        ):
            break  # the study's own process is the launching one of a point
        if time.monotonic() > deadline_s:
            return f"study {study.name}: its command (process {pid}) stops before its next point"
        pause.wait(POLL_S / 5)
    if study.is_running_here() is None:
        return (
            f"study {study.name}: its command on {study.read().get('host')} stops before its next"
            " point"
        )
    return None


def _mark(folder: RunFolder) -> str | None:
    """Write the mark that tells a stopped run why; return the error if it cannot be written."""
    try:
        write_json(folder.cancelled_json, requested_by())
    except OSError as error:
        return f"cannot write to its folder ({error.strerror})"
    return None


def _refusal(run: RunStatus) -> str | None:
    """Return why an active run cannot be cancelled from here, or None."""
    status = run.status
    job_id = run.job_id
    if job_id is not None:
        scheduler = system_of(job_id)
        name = run_name(run.folder.path).strip()
        if run.job_name in (None, scheduler.job_name(name)):
            return None
        return (
            f"job {job_id} is called {run.job_name!r}: `{scheduler.cancel_program} {job_id}` if you"
            " mean all of it"
        )
    if "job_id" in status:
        return f"its job_id {status['job_id']!r} is no job's ID"
    if run.recorded_state == SUBMITTING:
        return f"it is being submitted ({run.note}): try again"
    if run.recorded_state == "prepared":
        return "it was started by hand: end it there"
    if not is_alive_here(status):
        return f"it runs on {status.get('host')}: call this there"
    if not status.get("pid_started"):
        return f"its status.json does not tell when process {status.get('pid')} started"
    return None


def _end_here(run: RunStatus) -> Result:
    """End a run of this machine through its launching process.

    That process ends the ranks and records the end in status.json.
    """
    pid = run.status["pid"]
    started = str(run.status["pid_started"])
    try:
        has_ended = end_stranger(
            pid, started, GRACE_S, lambda: run.folder.read_status().get("state") != "running"
        )
    except PermissionError:
        run.folder.cancelled_json.unlink(missing_ok=True)
        return run.folder, REFUSED, f"process {pid} belongs to somebody else"
    return (
        _record_end(run, f"process {pid}")
        if has_ended
        else (run.folder, ENDING, f"process {pid} is still there")
    )


def _await_jobs(jobs: Sequence[RunStatus], error: str | None) -> list[Result]:
    """Wait until the batch system has ended the jobs, or the runs have recorded how they ended."""
    pause = threading.Event()
    deadline_s = time.monotonic() + END_LIMIT_S
    waiting = {run.folder.path: run for run in jobs}
    results = []
    while waiting:
        for now in run_statuses([run.folder for run in waiting.values()]).runs:
            is_unknown = now.state == "submitted" and now.is_guess and error is None
            if not now.is_active or is_unknown:
                run = waiting.pop(now.folder.path)
                results.append(_record_end(run, f"job {run.job_id}"))
        if error is not None or time.monotonic() > deadline_s:
            break
        pause.wait(POLL_S if waiting else 0)
    for run in waiting.values():
        if error is not None:
            run.folder.cancelled_json.unlink(missing_ok=True)
        why = (
            f"job {run.job_id}:"
            f" {error or f'{title(run.job_id)} is ending it, and status.json will tell'}"
        )
        results.append((run.folder, ENDING if error is None else REFUSED, why))
    return results


def _record_end(run: RunStatus, what: str) -> Result:
    """Record the end of a run that has not done so itself.

    Its process was killed, or its job never started.
    """
    status = run.folder.read_status()
    if status.get("state") in UNFINISHED or status == run.status:
        more = {key: value for key, value in status.items() if key not in ("state", "updated_utc")}
        run.folder.write_status("cancelled", **{**more, "cause": "cancelled"})
    elif status.get("state") != CANCELLED:
        run.folder.cancelled_json.unlink(missing_ok=True)
        return run.folder, LEFT, f"it is {status.get('state')}"
    return run.folder, CANCELLED, what

"""Prove that the owner of a run folder is gone, and complete interrupted submissions.

The proof includes the owner's batch system. Whoever submits writes "submitting" into status.json
before the command that submits, with a token that the job carries (with SLURM, in the name of the
batch script). If the submitter ends before it has written the job's ID, the next look at the run
finds the job by the token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.owner import SUBMITTING, Owner, Verify, in_use, read_owner
from gems.utils.process_tree import is_mentioned
from jobs.batch.command import SchedulerError, SchedulerUnavailableError
from jobs.batch.job import JobId, ListedJob, name_submission, script_path
from jobs.schedulers.scheduler import find_submitted, is_job_id, list_jobs
from jobs.status.job_record import JobRecord

ABANDONED_WAIT_S = 10.0  # wait for a submission whose caller has ended
OLD_S = 600.0
POLL_S = 0.1
UNSURE = "try again, or add --force if you know that it has ended"
Find = Callable[[str], ListedJob | None]


def gone_verifier(*, force: bool = False, find: Find | None = None) -> Verify:
    """Return the check that raises TryLaterError unless a folder's owner is gone.

    A job of the run's chain that waits or runs keeps the folder as the owner does. With `force`, an
    owner counts as gone if its state cannot be determined, but never if it is known to exist.
    `find` looks jobs up; by default, one command runs per job.
    """
    look_up = find or _find

    def verify(folder: RunFolder, owner: Owner) -> None:
        record = JobRecord.read(folder)
        chain = record.chain
        has_finished = owner.job_id is None or record.status.get("state") == "finished"
        if owner.is_released and not chain and has_finished:
            return
        if owner.job_id is None and owner.is_alive_here:
            is_submitting = record.status.get("state") == SUBMITTING
            what = "it is being submitted" if is_submitting else "a run goes on there"
            raise in_use(folder, f"{what} (process {owner.pid})", "wait for it, or change name=")
        doubt = None
        found = None
        active = None
        try:
            # the owner may already have the job's number, because status.json is written later
            if record.is_submission_of(owner):
                found = complete_submissions([folder]).get(owner.token)
            own = owner.job_id if found is None else record.own_number(found)
            for job_id in dict.fromkeys(filter(None, (own, *chain))):
                job = found if found is not None and found.job_id == job_id else look_up(job_id)
                if job is not None and job.is_active:
                    active = job_id
                    break
        except SchedulerError as error:
            doubt = str(error)
        if active is not None:
            advice = f"wait for it, `gems-jobs cancel {folder.path.name}`, or change name="
            raise in_use(folder, f"belongs to job {active}, which has not ended", advice)
        if owner.is_released or (force and doubt is not None):
            return
        if doubt is not None:
            is_unknown = owner.job_id is None
            whose = (
                "a job whose submission was interrupted" if is_unknown else f"job {owner.job_id}"
            )
            why = f"belongs to {whose}, and nobody can tell whether it has ended ({doubt})"
            raise in_use(folder, why, UNSURE)
        if owner.job_id is None and owner.is_alive_here is None and found is None:
            _check_other_host(folder, owner, force)

    return verify


def _check_other_host(folder: RunFolder, owner: Owner, force: bool) -> None:
    """Raise TryLaterError for a process on another host.

    With `force`, a process that is old enough counts as ended.
    """
    age_s = 0.0
    with contextlib.suppress(ValueError):
        age_s = (datetime.now(UTC) - datetime.fromisoformat(owner.utc)).total_seconds()
    if force and age_s > OLD_S:
        return
    who = (
        f"process {owner.pid} on {owner.host}"
        if owner.host
        else f"somebody (owners/{owner.number:04d}.json)"
    )
    advice = "call this there, or add --force if it has ended"
    if force:
        advice = f"--force takes it {OLD_S / 60:.0f} min after its start"
    raise in_use(
        folder, f"belongs to {who}, and nobody can tell from here whether it has ended", advice
    )


def complete_submissions(folders: Sequence[RunFolder]) -> dict[str, ListedJob]:
    """Complete the interrupted submissions of some folders; return the jobs by token.

    One query covers all folders. A submission whose process is alive is left to that process.

    Raises:
        SchedulerError: there is no list of jobs.
    """
    owners = {}
    tokens = {}
    for folder in folders:
        with contextlib.suppress(ConfigError, OSError):
            owner = read_owner(folder)
            record = JobRecord.read(folder)
            if owner is not None and record.is_submission_of(owner) and not owner.is_alive_here:
                owners[folder.path] = owner
                tokens[owner.token] = record.system
                if owner.is_alive_here is False:
                    _await_submission(owner.token)
    found = find_submitted(tokens)
    for path, owner in owners.items():
        if owner.token in found:
            job = found[owner.token]
            folder = RunFolder(path)
            with contextlib.suppress(OSError):  # the folder may belong to another user
                job_id = JobRecord.read(folder).own_number(job)
                if job.command:
                    name_submission(
                        Path(job.command).parent, owner.token, JobId.parse(job.job_id).number
                    )
                name_submission(folder.logs, owner.token, job_id)
                record_submission(folder, owner, job_id)
    return found


def record_submission(
    folder: RunFolder,
    owner: Owner,
    job_id: str,
    state: str = "submitted",
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Record the job of a submission as the owner, and the state, unless this has been done."""
    record = JobRecord.read(folder)
    if record.is_submission_of(owner):
        owner.update(folder, job_id=job_id)
        folder.change_status(
            record.status,
            state,
            ("token", "scheduler", "task"),
            **{**(facts or {}), "job_id": job_id},
        )


def _await_submission(token: str) -> None:
    """Wait until no process on this machine names the submission's script or has it open.

    Raises:
        SchedulerUnavailableError: a process still does after ABANDONED_WAIT_S.
    """
    pause = threading.Event()
    deadline_s = time.monotonic() + ABANDONED_WAIT_S
    while is_mentioned(script_path(Path(), token).name):
        if time.monotonic() > deadline_s:
            raise SchedulerUnavailableError("the submission", "has not answered yet")
        pause.wait(POLL_S)


def find_among(job_ids: Iterable[str]) -> Find:
    """Query some jobs at once, and return a function that looks a job up in the answer.

    The function runs one command for each job that was not among them. If there was no list of
    jobs, it raises SchedulerError for the jobs that were.
    """
    wanted = set(filter(is_job_id, job_ids))
    jobs: dict[str, ListedJob] = {}
    failure: SchedulerError | None = None
    if wanted:
        try:
            jobs = {job.job_id: job for job in list_jobs(wanted)}
        except SchedulerError as error:
            failure = error

    def find(job_id: str) -> ListedJob | None:
        if job_id not in wanted:
            return _find(job_id)
        if failure is not None:
            raise failure
        return jobs.get(job_id)

    return find


def _find(job_id: str) -> ListedJob | None:
    """Return a job, or None if its system has forgotten it.

    Raises:
        SchedulerError: there is no list of jobs.
    """
    if not is_job_id(job_id):
        raise SchedulerError("the queue", f"cannot be asked for job {job_id!r}")
    return next((job for job in list_jobs([job_id]) if job.job_id == job_id), None)

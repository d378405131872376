"""The record of a run's jobs in its folder, and the proof that a folder's owner is gone.

`chain.json` has the jobs that continue the run one after the other, and `requeues.json` its starts
again. These are two files because they have two writers: the submitting process may still add jobs
to the chain when a job of it counts its own start. The present job or submission is in status.json.

Whoever submits writes "submitting" into status.json before the command that submits, with a token
that the job carries (with SLURM, in the name of the batch script). If the submitter ends before it
has written the job's ID, the next look at the run finds the job by the token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gems.errors import ConfigError, DoesNotFitError
from gems.runs.folder import RunFolder
from gems.runs.owner import SUBMITTING, Owner, Verify, in_use, own_job_id, read_owner
from gems.utils.atomic_io import read_json, write_json
from gems.utils.process_tree import is_mentioned
from gems.utils.units import now_utc
from jobs.batch.command import SchedulerError, SchedulerUnavailableError
from jobs.batch.job import Job, JobId, name_submission, script_path
from jobs.schedulers.scheduler import find_submitted, is_job_id, list_jobs

CHAIN_JSON = "chain.json"
REQUEUES_JSON = "requeues.json"
# Who starts a run again.
LAUNCHER = "launcher"
SLURM = "SLURM"
CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The jobs of a run.

    `status` is status.json. `chain` has the numbers of the jobs of a chain; it is empty if the run
    has a single job. `requeues` has a row for each start again, oldest first, with the keys utc,
    why, by, job_id and step.
    """

    folder: RunFolder
    status: Mapping[str, Any]
    chain: tuple[str, ...]
    requeues: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, folder: RunFolder) -> JobRecord:
        """Read the record; damaged files count as empty."""
        status: Mapping[str, Any] = {}
        with contextlib.suppress(ConfigError, OSError):
            status = folder.read_status()
        rows = read_or_empty(folder.path / REQUEUES_JSON).get("requeues", ())
        return cls(folder, status, tuple(read_chain(folder)), tuple(rows))

    @property
    def system(self) -> str:
        """The batch system of the submission, with its clusters if they are not the default."""
        # earlier versions recorded submissions without a system
        return str(self.status.get("scheduler", "slurm"))

    @property
    def is_over(self) -> bool:
        """Whether a chain has nothing left to do.

        This is so if the run is finished or cancelled, or would fail again.
        """
        codes = (ConfigError.exit_code, DoesNotFitError.exit_code)
        has_ended = self.status.get("state") in ("finished", "cancelled")
        return has_ended or self.status.get("exit_code") in codes

    @property
    def next_job(self) -> str | None:
        """The job that continues this run after this process's job, or None."""
        own = own_job_id()
        following = self.chain[self.chain.index(own) + 1 :] if own in self.chain else ()
        return following[0] if following else None

    def is_submission_of(self, owner: Owner) -> bool:
        """Return whether this owner submits the run and has no job ID yet."""
        return (
            self.status.get("state") == SUBMITTING
            and self.status.get("token") == owner.token
            and not owner.is_released
        )

    def own_number(self, job: Job) -> str:
        """Return the number of the run's own job; `job` is any task of its submission."""
        task = self.status.get("task")
        return str(JobId.parse(job.job_id)._replace(task="" if task is None else str(task)))

    def with_requeue(self, why: str, by: str, step: int | None) -> JobRecord:
        """Write one more start of the run, and return the record with it."""
        row = {"utc": now_utc(), "why": str(why), "by": by, "job_id": own_job_id(), "step": step}
        return self.with_requeues((*self.requeues, row))

    def with_requeues(self, rows: tuple[dict[str, Any], ...]) -> JobRecord:
        """Write the starts of the run, and return the record with them."""
        write_json(self.folder.path / REQUEUES_JSON, {"requeues": rows})
        return replace(self, requeues=rows)


def read_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object; a damaged or unreadable file counts as empty."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return {}


def read_chain(folder: RunFolder) -> list[str]:
    """Read the chain alone."""
    return [*read_or_empty(folder.path / CHAIN_JSON).get("jobs", ())]


def write_chain(folder: RunFolder, job_ids: list[str]) -> None:
    """Write the jobs of a chain that have been submitted so far."""
    write_json(folder.path / CHAIN_JSON, {"jobs": job_ids})


ABANDONED_WAIT_S = 10.0  # wait for a submission whose caller has ended
OLD_S = 600.0
POLL_S = 0.1
UNSURE = "try again, or add --force if you know that it has ended"
Find = Callable[[str], Job | None]


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
        submitted = None
        active = None
        try:
            # the owner may already have the job's number, because status.json is written later
            if record.is_submission_of(owner):
                submitted = complete_submissions([folder]).get(owner.token)
            own = owner.job_id if submitted is None else record.own_number(submitted)
            for job_id in dict.fromkeys(filter(None, (own, *chain))):
                job = (
                    submitted
                    if submitted is not None and submitted.job_id == job_id
                    else look_up(job_id)
                )
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
        if owner.job_id is None and owner.is_alive_here is None and submitted is None:
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


def complete_submissions(folders: Sequence[RunFolder]) -> dict[str, Job]:
    """Complete the interrupted submissions of some folders; return the jobs by token.

    One query covers all folders. A submission whose process is alive is left to that process.

    Raises:
        SchedulerError: There is no list of jobs.
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
    submitted = find_submitted(tokens)
    for path, owner in owners.items():
        if owner.token in submitted:
            job = submitted[owner.token]
            folder = RunFolder(path)
            with contextlib.suppress(OSError):  # the folder may belong to another user
                job_id = JobRecord.read(folder).own_number(job)
                if job.script:
                    name_submission(
                        Path(job.script).parent, owner.token, JobId.parse(job.job_id).number
                    )
                name_submission(folder.logs, owner.token, job_id)
                record_submission(folder, owner, job_id)
    return submitted


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
        SchedulerUnavailableError: A process still does after ABANDONED_WAIT_S.
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
    jobs: dict[str, Job] = {}
    failure: SchedulerError | None = None
    if wanted:
        try:
            jobs = {job.job_id: job for job in list_jobs(wanted)}
        except SchedulerError as error:
            failure = error

    def find(job_id: str) -> Job | None:
        if job_id not in wanted:
            return _find(job_id)
        if failure is not None:
            raise failure
        return jobs.get(job_id)

    return find


def _find(job_id: str) -> Job | None:
    """Return a job, or None if its system has forgotten it.

    Raises:
        SchedulerError: There is no list of jobs.
    """
    if not is_job_id(job_id):
        raise SchedulerError("the queue", f"cannot be asked for job {job_id!r}")
    return next((job for job in list_jobs([job_id]) if job.job_id == job_id), None)

"""A submission as a transaction: whatever ends it, and whenever, the job is recorded or can be found."""

from __future__ import annotations

import os
import signal
import threading
import types
from typing import Any, Protocol, Self

from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from gems.runs.owner import Owner, Verify, new_token, read_owner, take
from gems.utils.process_tree import start_time
from gems.utils.stdio import report
from jobs.slurm.jobs import name_submission
from jobs.slurm.resources import JobSpec
from jobs.status.ownership import SUBMITTING, record_submission

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Work(Protocol):
    """What a batch script calls."""

    def __call__(self) -> None:
        """Run the job."""

    def with_token(self, token: str) -> Self:
        """Return the same for the submission of this token."""


class SignalsWait:
    """Keeps SIGINT, SIGTERM and SIGHUP until its end, and then raises the first that came.

    They are blocked, which sbatch inherits: what a terminal sends to the whole group ends it neither. Threads of
    libraries block nothing, and so they are noted too. Entered by another than the main thread it does nothing, as
    Python allows no handlers there.
    """

    def __enter__(self) -> Self:
        self.came: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.came:
            signal.raise_signal(self.came[0])

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.came.append(number)


class Ownership:
    """The folders that this process takes, all by one token; they are given back if it ends by an error."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self.token = new_token()
        self.taken: list[tuple[RunFolder, Owner]] = []

    def take(self, folder: RunFolder) -> None:
        """Make this process the owner; raises TryLaterError unless the owner before is proven gone."""
        self.taken.append((folder, take(folder, self._verify, token=self.token)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for folder, owner in self.taken if kind is not None else ():
            if read_owner(folder) == owner:  # else SLURM has its job, or may have
                owner.release(folder)


def submit_owned(
    spec: RunSpec, job: JobSpec, ownership: Ownership, work: Work, state: str = "submitted",
    facts: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Submit the prepared runs of one job, record it as their owner with `state` and `facts`, and return its number.

    Raises as `submit_job`; unless nobody can tell whether SLURM has the job, the runs are as before then.
    """
    from jobs.slurm.executor import UnclearSubmissionError, submit_job

    token, pid = ownership.token, os.getpid()
    folders = [folder for folder, _ in ownership.taken]
    where = {"token": token, "host": os.uname().nodename, "pid": pid, "pid_started": start_time(pid)}
    before = [folder.read_status() for folder in folders]
    with SignalsWait() as signals:
        for folder in folders:
            folder.write_status(SUBMITTING, **{**(facts or {}), **where})
        try:
            job_id = submit_job(spec, job, folders[0], work.with_token(token), token)
            name_submission(folders[0].logs, token, job_id)
            for folder, owner in ownership.taken:
                record_submission(folder, owner, job_id, state, facts)
        except (UnclearSubmissionError, OSError):  # the next command looks for the job: this process is done with it
            for folder, owner in ownership.taken:
                owner.update(folder, pid=0)
                folder.write_status(SUBMITTING, **{**(facts or {}), **where, "pid": 0})
            raise
        except BaseException:
            for folder, status in zip(folders, before, strict=True):
                folder.write_status(**{name: value for name, value in status.items() if name != "updated_utc"})
            raise
        if signals.came or set(SIGNALS) & signal.sigpending():
            name = folders[0].path.name
            report("jobs", f"interrupted, and job {job_id} is submitted: `python -m jobs cancel {name}` ends it")
    return job_id

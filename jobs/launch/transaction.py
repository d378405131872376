"""Submit jobs as transactions: after any interruption, the job is recorded or can be found."""

from __future__ import annotations

import os
import signal
import threading
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from gems.runs.folder import RunFolder
from gems.runs.owner import SUBMITTING, Owner, Verify, new_token, read_owner, take
from gems.utils.process_tree import start_time
from jobs.batch.job import JobId, UnclearSubmissionError, name_submission
from jobs.batch.output import report
from jobs.batch.resources import JobSpec, Work
from jobs.schedulers.scheduler import place, scheduler_for
from jobs.status.job_record import record_submission

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalsWait:
    """A context that delays SIGINT, SIGTERM and SIGHUP, and raises the first one at its end.

    The signals are blocked. sbatch inherits this, so a terminal's signal to the whole group does
    not end it either. Threads of libraries may receive the signals, so a handler records them too.
    Outside the main thread the context does nothing, because Python allows no handlers there.
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
        try:
            self._restore()
        finally:
            # a signal that another thread received may be raised as soon as its handler is restored
            self._restore()
        if self.came:
            signal.raise_signal(self.came[0])

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.came.append(number)


class Ownership:
    """The folders that this process owns by one token; an error in the block releases them."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self.token = new_token()
        self.taken: list[tuple[RunFolder, Owner]] = []

    def take(self, folder: RunFolder) -> None:
        """Make this process the owner of a folder.

        Raises:
            TryLaterError: The previous owner may not have ended.
        """
        self.taken.append((folder, take(folder, self._verify, token=self.token)))

    def part(self, folders: Iterable[RunFolder]) -> Ownership:
        """Return the ownership of some folders, with its own token, for a separate submission.

        `release` of the whole ownership releases the folders that the part does not submit.
        """
        chosen = {folder.path for folder in folders}
        part = Ownership(self._verify)
        for index, (folder, owner) in enumerate(self.taken):
            if folder.path in chosen:
                self.taken[index] = (folder, owner.update(folder, token=part.token))
                part.taken.append(self.taken[index])
        return part

    def release(self) -> None:
        """Release the folders that were not submitted."""
        for folder, owner in self.taken:
            if read_owner(folder) == owner:  # else SLURM has its job, or may have it
                owner.release(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.release()


def _submitter(token: str, scheduler: str, pid: int) -> dict[str, Any]:
    """Return the fields that identify an interrupted submission."""
    return {
        "token": token,
        "scheduler": scheduler,
        "host": os.uname().nodename,
        "pid": pid,
        "pid_started": start_time(os.getpid()),
    }


def submit_owned(
    job: JobSpec,
    ownership: Ownership,
    works: Sequence[Work],
    state: str = "submitted",
    facts: dict[str, Any] | None = None,
    home: RunFolder | None = None,
) -> list[str]:
    """Submit prepared runs, as one job or as an array of several works; return their job numbers.

    The job is recorded as the owner of its runs, with `state` and `facts`. `home` is the folder of
    an array's script and output. Raises the errors of `Scheduler.submit`. On an error, the runs are
    as before, unless it is unknown whether SLURM has the job.
    """
    token = ownership.token
    is_array = len(works) > 1
    firsts = [RunFolder(Path(work.run_folders[0])) for work in works]
    home = home if home is not None and is_array else firsts[0]
    tasks = {path: task for task, work in enumerate(works) for path in work.run_folders}
    taken = [(folder, owner, tasks[str(folder.path)]) for folder, owner in ownership.taken]
    before = [folder.read_status() for folder, _, _ in taken]

    def mark(pid: int) -> None:
        for folder, _, task in taken:
            own = {"task": task} if is_array else {}
            folder.write_status(
                SUBMITTING, **{**(facts or {}), **_submitter(token, place(job.cluster), pid), **own}
            )

    with SignalsWait() as signals:
        mark(os.getpid())
        try:
            number = scheduler_for(job.cluster).submit(
                job, home, [work.with_token(token) for work in works], token
            )
            names = map(str, range(len(works))) if is_array else ("",)
            job_ids = [str(JobId.parse(number)._replace(task=task)) for task in names]
            name_submission(home.logs, token, number)
            for first, job_id in zip(firsts, job_ids, strict=True):
                name_submission(first.logs, token, job_id)
            for folder, owner, task in taken:
                record_submission(folder, owner, job_ids[task], state, facts)
        except (UnclearSubmissionError, OSError):
            # the next command looks for the job
            for folder, owner, _ in taken:
                owner.update(folder, pid=0)
            mark(0)
            raise
        except BaseException:
            for (folder, _, _), status in zip(taken, before, strict=True):
                folder.write_status(
                    **{name: value for name, value in status.items() if name != "updated_utc"}
                )
            raise
        if signals.came or set(SIGNALS) & signal.sigpending():
            end = f"`gems-jobs cancel {firsts[0].path.name}` ends it"
            report(f"interrupted, and job {number} is submitted: {end}")
    return job_ids

"""The program of a batch script, on the first node of the allocation."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from gems.errors import SIGNAL_BASE, GemsError, TryLaterError
from gems.runs.failure_cause import classify_error
from gems.runs.folder import RunFolder
from gems.runs.owner import CLUSTER_VARIABLE, Owner, own_job_id, read_owner, take
from gems.utils.process_tree import start_time
from jobs.batch.job import JobId
from jobs.batch.output import report
from jobs.batch.resources import TOKEN_VARIABLE
from jobs.launch.elastic import Recovery
from jobs.launch.launch import StopRequest, launch
from jobs.launch.notify import notify
from jobs.launch.own_job import hand_over, num_restarts
from jobs.status.job_record import JobRecord, read_chain

SUBMITTED_LIMIT_S = 60.0
POLL_S = 0.1
STOPPED = ("stopped", "requeued")  # the whole job must end, not just one run


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A launcher of prepared runs, one after another; a failed run does not end the others.

    submitit pickles it by name, so unpickling needs this package and nothing else. `token` is the
    token of its submission.
    """

    run_folders: tuple[str, ...]
    token: str = ""

    def with_token(self, token: str) -> Self:
        """Return the same work for the submission of this token."""
        return replace(self, token=token)

    def __call__(self) -> None:
        """Run the job; skip runs that had finished before SLURM restarted the job.

        Raises:
            SystemExit: With the worst exit code of the runs, unless it is 0. submitit stores other
                exceptions in a pickle and exits with 1; this one passes through, so SLURM sees the
                code and the job is FAILED.
        """
        worst = 0
        for folder in (RunFolder(Path(path)) for path in self.run_folders):
            _adopt_cluster(folder)
            status = JobRecord.read(folder).status  # errors in the folder are reported later
            if status.get("state") == "finished" and status.get("job_id") == own_job_id():
                report(f"run {folder.path.name} has finished: nothing is left to do")
                continue
            # submitit's own handler of SIGUSR2 would end the job
            with StopRequest() as request:
                code = run_prepared(folder, request, self.token)
            worst = max(worst, code)
            if code > SIGNAL_BASE or folder.read_status().get("state") in STOPPED:
                break
        if worst:
            raise SystemExit(worst)


def run_prepared(folder: RunFolder, request: StopRequest, token: str) -> int:
    """Launch a prepared run in its job and return the exit code.

    Do nothing if the folder has a later owner.
    """
    # a new job may not be recorded yet
    other = _other_owner(folder, token) if num_restarts() else None
    if other is None:
        wait_for_submission(folder)
        record = JobRecord.read(folder)
        if own_job_id() in record.chain and record.is_over:
            state = record.status.get("state")
            report(f"the run is {state}; this job of its chain has nothing to do")
            return 0
        other = claim(folder, token)
    if other is not None:
        job = (
            f"job {other.job_id}"
            if other.job_id is not None
            else f"process {other.pid} on {other.host}"
        )
        report(f"the folder belongs to {job} now; this job leaves it alone")
        return 0
    try:
        recovery = Recovery(folder, BatchJob((str(folder.path),)))
        code = None
        recovery.return_to_own_layout()
        while code is None or recovery.again:
            recovery.again = False
            spec = folder.read_spec()
            code = launch(folder, spec, echo=False, request=request, recovery=recovery)
        return 0 if recovery.has_moved else code
    except GemsError as error:
        report(str(error))
        code = error.exit_code
        cause_class = str(classify_error(error).cause)
        if folder.read_status().get("state") not in ("failed", "cancelled", "requeued", "stopped"):
            own = own_job_id()
            folder.write_status(
                "failed", exit_code=code, cause=str(error), cause_class=cause_class, job_id=own
            )
        return code
    finally:
        with contextlib.suppress(GemsError, OSError):  # a fault of the folder has been reported
            hand_over(folder)
        notify(folder)


def wait_for_submission(folder: RunFolder) -> None:
    """Wait until the submitting process has recorded this job.

    Otherwise it would overwrite a later state with "submitted".
    """
    pause = threading.Event()
    deadline_s = time.monotonic() + SUBMITTED_LIMIT_S
    while not _is_recorded(folder) and time.monotonic() < deadline_s:
        pause.wait(POLL_S)


def _is_recorded(folder: RunFolder) -> bool:
    _adopt_cluster(folder)
    record = JobRecord.read(folder)
    return own_job_id() in (record.status.get("job_id"), *record.chain)


def _adopt_cluster(folder: RunFolder) -> None:
    """Adopt the cluster with which the submission recorded this job.

    sbatch may have named a cluster that nobody chose.
    """
    own = own_job_id()
    record = JobRecord.read(folder)
    for job_id in map(JobId.parse, (*record.chain, str(record.status.get("job_id")))):
        if job_id.cluster and own is not None and job_id.local == JobId.parse(own).local:
            os.environ[CLUSTER_VARIABLE] = job_id.cluster


def _other_owner(folder: RunFolder, token: str) -> Owner | None:
    """Return the owner of a folder unless it is this job or its submission."""
    owner = read_owner(folder)
    own = own_job_id()
    if owner is None or owner.is_mine or (own is not None and owner.job_id == own):
        return None
    chain = read_chain(folder)
    # an earlier job of the chain has ended before this one started
    if own in chain and owner.job_id in chain[: chain.index(own)]:
        return None
    return owner if not token or owner.token != token else None


def claim(folder: RunFolder, token: str) -> Owner | None:
    """Make this job's process the owner, or return the owner that was faster.

    A restarted job that had released the folder must take it again; it may have another owner.
    """
    owner = read_owner(folder)
    if (other := _other_owner(folder, token)) is not None:
        return other
    if owner is not None and owner.token and not owner.is_released:
        pid = os.getpid()
        where = {"host": os.uname().nodename, "pid": pid, "pid_started": start_time(pid)}
        owner.update(folder, job_id=own_job_id(), **where)
    else:
        with contextlib.suppress(TryLaterError):
            take(folder, token=token, job_id=own_job_id())
    return _other_owner(folder, token)


def main(run_folders: list[str]) -> None:
    """Run the job of a batch script that calls this module with its run folders.

    submitit calls BatchJob by itself.
    """
    # Flux ends a batch script by SIGHUP
    signal.signal(signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    BatchJob(tuple(run_folders), os.environ.get(TOKEN_VARIABLE, ""))()


if __name__ == "__main__":
    main(sys.argv[1:])

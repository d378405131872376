"""What runs in a SLURM batch script, on the first node of the allocation."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gems.errors import SIGNAL_BASE, GemsError
from gems.runs.failure_cause import classify_error
from gems.runs.folder import RunFolder
from gems.utils.stdio import report
from jobs.launch.launch import StopRequest, launch
from jobs.launch.own_job import own_job_id, successor

SUBMITTED_LIMIT_S = 60.0
POLL_S = 0.1
STOPPED = ("stopped", "requeued")  # the job is to end, not one run alone


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Launches prepared runs, one after another; a run that fails does not end the others.

    submitit pickles it by name, so it needs this package and nothing else.
    """

    run_folders: tuple[str, ...]

    def __call__(self) -> None:
        """Run the job; one of several runs is skipped after a requeue if it has finished.

        Raises:
            SystemExit: with the worst of the runs' exit codes unless it is 0. submitit keeps other exceptions in a
                pickle and exits with 1; this one goes through, so SLURM sees the code and the job is FAILED.
        """
        worst = 0
        for folder in (RunFolder(Path(path)) for path in self.run_folders):
            status = folder.read_status() if len(self.run_folders) > 1 else {}
            if status.get("state") == "finished" and status.get("job_id") == own_job_id():
                continue
            with StopRequest() as request:  # from here on: submitit's own handler of SIGUSR2 would end the job
                code = run_prepared(folder, request)
            worst = max(worst, code)
            if code > SIGNAL_BASE or folder.read_status().get("state") in STOPPED:
                break
        if worst:
            raise SystemExit(worst)


def run_prepared(folder: RunFolder, request: StopRequest) -> int:
    """Launch a prepared run in its job and return the exit code, unless another job has taken it over."""
    if (other := successor(folder)) is not None:
        report("jobs", f"the run continues as job {other}; this one leaves it alone")
        return 0
    wait_for_submission(folder)
    try:
        work = BatchJob((str(folder.path),))
        return launch(folder, folder.read_spec(), echo=False, request=request, work=work)
    except GemsError as error:
        report("jobs", str(error))
        code, cause_class = error.exit_code, str(classify_error(error).cause)
        if folder.read_status().get("state") not in ("failed", "cancelled", "requeued", "stopped"):
            own = own_job_id()
            folder.write_status("failed", exit_code=code, cause=str(error), cause_class=cause_class, job_id=own)
        return code


def wait_for_submission(folder: RunFolder, limit_s: float = SUBMITTED_LIMIT_S) -> None:
    """Wait until the submitting process has recorded this job: it would write "submitted" over a later state."""
    pause = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while folder.read_status().get("job_id") != own_job_id() and time.monotonic() < deadline_s:
        pause.wait(POLL_S)

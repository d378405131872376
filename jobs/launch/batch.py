"""What runs in a SLURM batch script, on the first node of the allocation."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gems.errors import GemsError
from gems.runs.failure_cause import classify_error
from gems.runs.folder import RunFolder
from jobs.launch.launch import launch
from jobs.launch.requeue import own_job_id, successor
from jobs.launch.termination import StopRequest

SUBMITTED_LIMIT_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Launches a prepared run; submitit pickles it by name, so it needs this package and nothing else."""

    run_folder: str

    def __call__(self) -> None:
        """Run the job.

        Raises:
            SystemExit: with the run's exit code unless it is 0. submitit keeps other exceptions in a pickle
                and exits with 1; this one goes through, so SLURM sees the code and the job is FAILED.
        """
        folder = RunFolder(Path(self.run_folder))
        with StopRequest() as request:  # from here on: submitit's own handler of SIGUSR2 would end the job
            code = self._run(folder, request)
        if code:
            raise SystemExit(code)

    def _run(self, folder: RunFolder, request: StopRequest) -> int:
        if (other := successor(folder)) is not None:
            print(f"jobs: the run continues as job {other}; this one leaves it alone", file=sys.stderr, flush=True)
            return 0
        wait_for_submission(folder)
        try:
            return launch(folder, folder.read_spec(), echo=False, request=request, work=self)
        except GemsError as error:
            print(f"jobs: {error}", file=sys.stderr, flush=True)
            code, cause_class = error.exit_code, str(classify_error(error).cause)
            if folder.read_status().get("state") not in ("failed", "cancelled", "requeued", "stopped"):
                folder.write_status(
                    "failed", exit_code=code, cause=str(error), cause_class=cause_class, job_id=own_job_id()
                )
            return code


def wait_for_submission(folder: RunFolder, limit_s: float = SUBMITTED_LIMIT_S) -> None:
    """Wait until the submitting process has recorded this job, lest it write "submitted" over a later state."""
    pause = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while folder.read_status().get("job_id") != own_job_id() and time.monotonic() < deadline_s:
        pause.wait(POLL_S)

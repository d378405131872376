"""SLURM behind the interface of a batch system, by `slurm_client`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from jobs.batch.command import run_command
from jobs.batch.job import Job, JobId
from jobs.batch.resources import JobSpec, Work
from jobs.schedulers.scheduler import SCHEDULERS, Scheduler
from jobs.schedulers.slurm_client import environment as slurm_environment
from jobs.schedulers.slurm_client import jobs as slurm_jobs
from jobs.schedulers.slurm_client import site
from jobs.schedulers.slurm_client.jobs import SACCT, SCONTROL, SQUEUE

REQUEUE_LIMIT_S = 20.0
STEP_FIELDS = (
    "JobID",
    "JobName",
    "State",
    "ExitCode",
    "Elapsed",
    "NTasks",
    "NodeList",
    "MaxRSS",
    "ConsumedEnergyRaw",
)
PERSONAL = ("UserId", "GroupId", "MailUser")


class Slurm(Scheduler):
    """SLURM, by sbatch, squeue, sacct, scontrol and scancel.

    The executor is imported when a script is written.
    """

    name = "slurm"
    title = "SLURM"
    program = "sbatch"
    queue_program = SQUEUE
    cancel_program = "scancel"
    job_id_form = re.compile(slurm_jobs.JOB_ID)
    has_arrays = has_site_checks = has_probe_jobs = True
    clusters = staticmethod(slurm_environment.clusters)
    notes = staticmethod(slurm_environment.notes)
    find_submitted = staticmethod(slurm_jobs.find_submitted)
    query_queue = staticmethod(partial(slurm_jobs.query_jobs, source=SQUEUE))
    query_accounting = staticmethod(partial(slurm_jobs.query_jobs, source=SACCT))
    find_job = staticmethod(slurm_jobs.find_job)
    cancel = staticmethod(slurm_jobs.cancel_jobs)
    num_queued = staticmethod(slurm_jobs.num_queued)
    max_array_tasks = staticmethod(site.max_array_tasks)

    def account_of_user(self) -> str | None:
        """Return the account of sbatch's variable."""
        return os.environ.get("SBATCH_ACCOUNT")

    def script(self, spec: RunSpec, job: JobSpec, folder: RunFolder) -> str:
        """Return the batch script of a run, by submitit."""
        from jobs.schedulers.slurm_client.sbatch import sbatch_script

        return sbatch_script(spec, job, folder)

    def submit(
        self, spec: RunSpec, job: JobSpec, folder: RunFolder, works: Sequence[Work], token: str
    ) -> str:
        """Submit one job, or an array with a task for each of several works."""
        from jobs.schedulers.slurm_client.sbatch import submit_job

        return submit_job(spec, job, folder, works, token)

    def list_jobs(self, job_ids: Iterable[str]) -> list[Job]:
        """List jobs by squeue; arrays are asked for as a whole."""
        found = []
        for cluster, numbers in slurm_jobs.by_cluster(job_ids).items():
            wholes = dict.fromkeys(JobId.parse(number).number for number in numbers)
            found += slurm_jobs.list_jobs(f"--jobs={','.join(wholes)}", cluster)
        return found

    def own_job(self, job_id: str, limit_s: float) -> Job | None:
        """Query scontrol."""
        local = JobId.parse(job_id).local  # in its own cluster, which is the default there
        return slurm_jobs.query_jobs([local], SCONTROL, limit_s=limit_s).jobs.get(local)

    def num_restarts(self) -> int:
        """Return the count that SLURM gives a job that starts again."""
        return int(os.environ.get("SLURM_RESTART_COUNT") or 0)

    def requeue(self, job_id: str) -> str | None:
        """Call `scontrol requeue`."""
        argv = ["scontrol", "requeue", JobId.parse(job_id).local]
        return run_command(argv, limit_s=REQUEUE_LIMIT_S).failure

    def kill_cause(self, text: str) -> str | None:
        """Read SLURM's message of the job's end."""
        found = [
            each
            for each in map(slurm_jobs.parse_cancellation, text.splitlines())
            if each and each.is_job
        ]
        # a cancelled task also has a message of its own
        own = [each for each in found if each.job_id == os.environ.get("SLURM_JOB_ID")]
        return own[-1].cause if own else None

    def record(self, job_id: str) -> dict[str, Any] | None:
        """Return the fields of `scontrol show job` except personal ones."""
        result = run_command(["scontrol", "--oneliner", "show", "job", JobId.parse(job_id).local])
        if result.error is not None:
            return None
        fields = slurm_jobs.scontrol_fields(result.lines)
        return {name: value for name, value in fields.items() if name not in PERSONAL}

    def record_steps(self, job_id: str) -> list[dict[str, str]] | None:
        """Return sacct's steps, if the site has accounting."""
        chosen = f"--jobs={JobId.parse(job_id).local}"
        words = ["--noheader", "--parsable2", f"--format={','.join(STEP_FIELDS)}", chosen]
        result = run_command(["sacct", *words])
        steps = [dict(zip(STEP_FIELDS, line.split("|"), strict=False)) for line in result.lines]
        return None if result.error else steps or None


SCHEDULERS.register(Slurm.name, Slurm())

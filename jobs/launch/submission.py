"""The start of a run: prepared and launched on this machine, or submitted to SLURM after its preflight."""

from __future__ import annotations

from functools import cache, partial

from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.runs.run_plan import plan_run
from gems.utils.stdio import report
from jobs.launch.batch import BatchJob
from jobs.launch.launch import launch
from jobs.launch.launchers import command
from jobs.preflight.checks import Check, passed, preflight
from jobs.preflight.cost import is_confirmed
from jobs.slurm.jobs import SQUEUE, query_jobs
from jobs.slurm.limits import TryLaterError, check_limits, check_submission
from jobs.slurm.resources import JobSpec, job_spec


def start_run(spec: RunSpec, *, assume_yes: bool = False) -> int:
    """Run here or submit to SLURM, with nothing on stdout, and return the exit code: 0 for a submitted job.

    Raises:
        ConfigError: no launcher, no permission, a refused job, a folder in use, or nobody to confirm the cost.
        DoesNotFitError: a rank would hold more than its device, or a node's ranks more than its host memory.
    """
    job = job_spec(spec)
    check_limits(spec, job)
    if job.is_batch:
        return 0 if submit_run(spec, job, assume_yes=assume_yes) else 1
    return launch(prepare_here(spec, job), spec, echo=False, is_quiet=True)


def submit_run(spec: RunSpec, job: JobSpec, *, assume_yes: bool) -> tuple[str, list[Check]] | None:
    """Submit a run to SLURM and return the job's number and the checks that it passed; None if its cost is refused."""
    from jobs.slurm.executor import executor, need_sbatch, submit_job

    folder = RunFolder.of(spec)
    script = executor(spec, job, folder).script()
    need_sbatch(job)
    check_submission(spec.cluster)
    release_folder(folder)
    plan = cache(partial(plan_run, spec))
    checks = passed(preflight(spec, job, script, plan))
    if not is_confirmed([job], spec.cluster.confirm_above_gpu_hours, assume_yes=assume_yes):
        report("jobs", "nothing is submitted")
        return None
    folder = prepare(spec, plan())
    job_id = submit_job(spec, job, folder, BatchJob((str(folder.path),)))
    folder.write_status("submitted", job_id=job_id)
    return job_id, checks


def prepare_here(spec: RunSpec, job: JobSpec) -> RunFolder:
    """Prepare the folder of a run on this machine, once its launcher has been found."""
    command(job, RunFolder.of(spec))
    return prepare(spec)


def release_folder(folder: RunFolder) -> None:
    """Mark a run whose job ended without recording it as failed, so that its folder can be prepared again.

    A run that has failed may have a job too: SLURM can start it again. Raises TryLaterError if its job waits or runs.
    """
    try:
        status = folder.read_status()
    except OSError:
        return  # the preparation of the folder reports what is wrong with it
    job_id = status.get("job_id")
    if status.get("state") in (None, "prepared", "finished") or job_id is None:
        return
    query = query_jobs([str(job_id)], SQUEUE)
    job = query.jobs.get(str(job_id))
    if job is not None and job.is_active:
        advice = f"wait for it, `python -m jobs cancel {folder.path.name}`, or change name="
        raise TryLaterError("run folder", folder.path, f"belongs to job {job_id}, which has not ended", advice)
    if query.error is None and status["state"] not in ("failed", "cancelled", "stopped"):
        more = {key: value for key, value in status.items() if key not in ("state", "updated_utc")}
        folder.write_status("failed", **{**more, "cause": "the job left the queue: cancelled, lost or out of time"})

"""Start a run: prepare and launch it on this machine, or submit it after its preflight."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.plan.evaluate import Plan, evaluate
from gems.runs.folder import RunFolder
from gems.runs.owner import check_free, new_token
from gems.runs.prepare import change_layout, prepare
from jobs.batch.job import name_submission
from jobs.batch.launchers import command
from jobs.batch.output import report
from jobs.batch.preset_limits import check_limits
from jobs.batch.resources import JobSpec, job_spec
from jobs.diagnosis.evidence import newest_checkpoint
from jobs.launch.batch import BatchJob
from jobs.launch.launch import LOGS, launch
from jobs.launch.transaction import Ownership, SignalsWait, submit_owned
from jobs.preflight.checks import Check, passed, preflight
from jobs.preflight.cost import is_confirmed
from jobs.preflight.layouts import plan_of_start
from jobs.schedulers.scheduler import scheduler_for, write_script
from jobs.status.job_record import gone_verifier, write_chain


def start_run(spec: RunSpec, *, assume_yes: bool = False, force: bool = False) -> int:
    """Run here or submit a job, with nothing on stdout, and return the exit code.

    The code is 0 for a submitted job.

    Raises:
        ConfigError: No launcher, no permission, a refused job, a folder in use, or nobody to
            confirm the cost.
        DoesNotFitError: A rank would need more than its device's memory, or a node's ranks more
            than its host memory.
    """
    job = job_spec(spec)
    check_limits(job, spec.machine.host_bytes)
    if job.is_batch:
        return 0 if submit_run(spec, job, assume_yes=assume_yes, force=force) else 1
    return launch(prepare_here(spec, job, force=force), spec, echo=False, summary=LOGS)


def submit_run(
    spec: RunSpec, job: JobSpec, *, assume_yes: bool, force: bool = False, num_jobs: int = 1
) -> tuple[str, list[Check]] | None:
    """Submit a run; return the job's number and the checks that it passed.

    Return None if the user rejects its cost. With `force`, the owner of the folder counts as gone
    if its state cannot be determined. `num_jobs` is the length of the chain that the job begins;
    the cost of the whole chain is confirmed.
    """
    folder = RunFolder.of(spec)
    scheduler = scheduler_for(spec.cluster)
    scheduler.check_here()
    scheduler.check_submission(spec.cluster)
    check_free(folder, gone_verifier(force=force))
    plan = cache(partial(evaluate, spec))
    layout = plan_of_start(spec, folder)
    run = spec
    if layout is not None:
        run = layout[0].spec
        job = replace(job_spec(run), after=job.after)
        report(f"{layout[1]}: the run starts by {run.layout}")
    get_plan = plan if layout is None else lambda: layout[0]
    checks = passed(preflight(run, job, write_script(job, folder), get_plan))
    if not is_confirmed([job] * num_jobs, assume_yes=assume_yes):
        report("nothing is submitted")
        return None
    return submit_together([plan()], job, force=force, layout=layout), checks


def submit_together(
    plans: Sequence[Plan],
    job: JobSpec,
    *,
    force: bool = False,
    layout: tuple[Plan, str] | None = None,
) -> str:
    """Prepare the runs of one job, submit it, and return its number.

    This process owns their folders until then. `layout` is the plan by which the first run starts
    instead of its own, and the reason.

    Raises:
        ConfigError: As in `prepare` and `Scheduler.submit`, or a folder is in use.
    """
    with Ownership(gone_verifier(force=force)) as ownership:
        folders = [prepare(plan.spec, plan, own=ownership.take) for plan in plans]
        if layout is not None:
            change_layout(
                folders[0],
                *layout,
                by=f"submission on {os.uname().nodename}",
                step=newest_checkpoint(folders[0]),
            )
        work = BatchJob(tuple(str(folder.path) for folder in folders))
        (job_id,) = submit_owned(job, ownership, [work])
        return job_id


def submit_chain(job: JobSpec, folder: RunFolder, job_id: str, num_jobs: int) -> list[str]:
    """Submit the jobs that continue a run after its first one, `job_id`; return the whole chain.

    Each job starts after its predecessor, resumes from the newest checkpoint, and ends at once if
    nothing is left to do. If one is refused, the chain is shorter, and that is reported.
    """
    chain = [job_id]
    work = BatchJob((str(folder.path),))
    submit = scheduler_for(job.cluster).submit
    for _ in range(num_jobs - 1):
        token = new_token()
        with SignalsWait():
            try:
                following = submit(
                    replace(job, after=chain[-1]), folder, [work.with_token(token)], token
                )
            except ConfigError as error:
                report(f"the chain has {len(chain)} of {num_jobs} jobs: {error}")
                break
            chain.append(following)
            write_chain(folder, chain)
            name_submission(folder.logs, token, following)
    return chain


def prepare_here(spec: RunSpec, job: JobSpec, *, force: bool = False) -> RunFolder:
    """Prepare the folder of a run on this machine, after its launcher has been found.

    This process owns the folder from then on.
    """
    command(job, RunFolder.of(spec))
    with Ownership(gone_verifier(force=force)) as ownership:
        return prepare(spec, own=ownership.take)

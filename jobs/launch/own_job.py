"""Query and record this process's own job, and decide how its run ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gems.config.schema import ClusterConfig
from gems.errors import SIGNAL_BASE, ConfigError, GemsError
from gems.launch.local_launcher import Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.owner import own_job_id, verify_gone
from gems.runs.provenance import ENVIRONMENT_JSON, check_code, environment
from gems.utils.atomic_io import read_json, write_json
from gems.utils.units import now_utc
from jobs.batch.job import Job
from jobs.batch.output import report
from jobs.batch.resources import JobSpec, Work
from jobs.diagnosis.root_cause import Failure
from jobs.launch.transaction import Ownership, submit_owned
from jobs.schedulers.scheduler import Scheduler, scheduler_of, title
from jobs.schedulers.slurm_client import jobs as slurm_jobs
from jobs.status.job_record import CHAIN, LAUNCHER, SLURM, JobRecord

# SLURM kills the job KillWait seconds after its SIGTERM; the answer is needed before that.
OWN_JOB_LIMIT_S = 3.0
EARLY_S = 60  # SLURM may send the signal before the end up to this many seconds early
TAIL_BYTES = 1 << 14
CANCELLED_CODE = SIGNAL_BASE + signal.SIGTERM
DESCRIPTIONS: dict[str | None, str] = {
    FailureCause.PREEMPTED: "was preempted",
    FailureCause.CANCELLED: "was cancelled",
    FailureCause.TIME_LIMIT: "reached its time limit",
    FailureCause.NODE: "lost a node",
    FailureCause.HOST_MEMORY: "exceeded its memory limit",
}


def own_scheduler() -> Scheduler | None:
    """Return the batch system of this process's job, or None outside a job."""
    return scheduler_of(own_job_id())


def num_restarts() -> int:
    """Return how often this job had been restarted when this attempt began."""
    scheduler = own_scheduler()
    return 0 if scheduler is None else scheduler.num_restarts()


def _stderr() -> Path:
    return Path(f"/proc/{os.getpid()}/fd/2").resolve()


LOG_START_BYTES = 0  # a restarted job appends to the log of its earlier attempts
with contextlib.suppress(OSError):
    LOG_START_BYTES = _stderr().stat().st_size


def own_job() -> Job | None:
    """Query this process's job; return None outside a job or without an answer."""
    scheduler = own_scheduler()
    return None if scheduler is None else scheduler.own_job(str(own_job_id()), OWN_JOB_LIMIT_S)


def will_restart(job: Job | None) -> bool:
    """Return whether SLURM will restart the job after this attempt."""
    return job is not None and job.restarts > num_restarts()


def kill_reason() -> str | None:
    """Read from the job's own output why its batch system ends it; return None if unknown.

    The result is a FailureCause, REQUEUED, or the system's own words. SLURM writes the message to
    the batch script's stderr before it sends SIGTERM: read what this process has added to its own.
    """
    start = LOG_START_BYTES
    try:
        with _stderr().open("rb") as file:
            if not file.seekable():
                return None
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= size else 0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return None
    scheduler = own_scheduler()
    return None if scheduler is None else scheduler.kill_cause(text)


def record_start(folder: RunFolder, code_is_snapshot: bool) -> None:
    """Record the job's environment and SLURM's record of it in `provenance/`, and check the code.

    The record is made now because scontrol forgets the job later, and not every site has
    accounting. The code must be the same as when the run was prepared. Outside of a job, do
    nothing. A job that SLURM restarted keeps the records of its earlier starts. If a record cannot
    be written, the run continues.

    Raises:
        ConfigError: The code archive was changed or is damaged.
    """
    job_id = own_job_id()
    if job_id is None:
        return
    with _recording():
        document = read_json(folder.provenance / ENVIRONMENT_JSON)
        write_json(folder.provenance / ENVIRONMENT_JSON, {**document, "job": environment()})
        starts = [*read_json(folder.slurm_json).get("starts", [])]
        if starts and folder.affinity_json.exists():  # from an earlier start on other nodes
            folder.affinity_json.rename(
                folder.affinity_json.with_name(f"affinity.start{len(starts)}.json")
            )
        starts.append({"restart_count": num_restarts(), "utc": now_utc(), "job": _record(job_id)})
        write_json(folder.slurm_json, {"job_id": job_id, "starts": starts})
    if not code_is_snapshot:
        return
    fault = check_code(folder.provenance, read_json(folder.provenance_json))
    if fault is not None:
        raise ConfigError("run folder", folder.path, fault, "submit it again")


def record_end(folder: RunFolder) -> None:
    """Record SLURM's record of the job after its ranks have ended.

    sacct's steps are included if the site has accounting.
    """
    job_id = own_job_id()
    if job_id is None:
        return
    with _recording():
        record = read_json(folder.slurm_json)
        if record.get("starts"):
            scheduler = own_scheduler()
            steps = None if scheduler is None else scheduler.record_steps(job_id)
            end = {"utc": now_utc(), "job": _record(job_id), "steps": steps}
            record["starts"][-1]["end"] = end
            write_json(folder.slurm_json, record)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        report(f"the batch system's record of the job cannot be written ({error})")


def _record(job_id: str) -> dict[str, Any] | None:
    scheduler = scheduler_of(job_id)
    return None if scheduler is None else scheduler.record(job_id)


def stop_cause(job: Job | None, cluster: ClusterConfig, reason: str) -> FailureCause | None:
    """Return why the batch system made a run save and stop, or None if a user did.

    If the system does not answer, the job counts as preempted after SIGTERM, and otherwise as out
    of time. `reason` is the signal of the ranks: at a preemption, only they receive SIGTERM.
    """
    if job is None:
        if reason == "SIGTERM":
            return FailureCause.PREEMPTED
        return None if own_job_id() is None else FailureCause.TIME_LIMIT
    if job.is_preempted:
        return FailureCause.PREEMPTED
    left_s = (job.end_utc - datetime.now(UTC)).total_seconds() if job.end_utc is not None else None
    is_near = left_s is not None and left_s <= cluster.signal_before_end_s + EARLY_S
    return FailureCause.TIME_LIMIT if is_near else None


@contextlib.contextmanager
def counted_requeue(folder: RunFolder, why: str, step: int | None) -> Iterator[dict[str, int]]:
    """Count a restart of the run by its launcher, and yield the count for status.json.

    Undo the count if the block raises because the start is refused.
    """
    record = JobRecord.read(folder).with_requeue(why, LAUNCHER, step)
    try:
        yield {"requeue_count": len(record.requeues)}
    except (GemsError, OSError):
        record.with_requeues(record.requeues[:-1])
        raise


def requeue_refusal(folder: RunFolder, cluster: ClusterConfig, why: str) -> str | None:
    """Return the reason why a saved run must not restart by itself, or None.

    The limit counts attempts that ran out of time or memory, or that lost nodes. A preemption is
    SLURM's own decision and costs the run no attempt.
    """
    options = {
        str(name).lstrip("-").replace("_", "-"): value for name, value in cluster.sbatch.items()
    }
    if options.get("no-requeue"):
        return "the job was submitted with no-requeue"
    record = JobRecord.read(folder)
    if record.next_job is not None:
        return f"job {record.next_job} of its chain continues"
    if cluster.max_requeues == 0:
        return "cluster.max_requeues=0"
    used = sum(row.get("why") == why and row.get("by") == LAUNCHER for row in record.requeues)
    if (
        why in (FailureCause.TIME_LIMIT, FailureCause.NODE, FailureCause.HOST_MEMORY)
        and used >= cluster.max_requeues
    ):
        return f"it has started again {used} times, which is cluster.max_requeues"
    return None


def requeue_run(
    folder: RunFolder,
    job: JobSpec,
    facts: dict[str, Any],
    why: str,
    step: int | None,
    work: Work | None,
) -> str | None:
    """Requeue this process's job, or submit `work` as a new job if SLURM refuses.

    Return the error, or None. requeues.json and status.json, which takes the `facts`, are written
    before the call to SLURM: SLURM may end this process at once, and then the calling command gets
    no answer. From then on a new job owns the folder. It waits until status.json has its number, so
    the two jobs never run at the same time.
    """
    job_id = str(own_job_id())
    error = None
    try:
        with counted_requeue(folder, why, step) as count:
            facts = facts | count
            folder.write_status("requeued", **facts | {"job_id": job_id})
            scheduler = own_scheduler()
            error = "it is in no job" if scheduler is None else scheduler.requeue(job_id)
            if error is None or kill_reason() == slurm_jobs.REQUEUED:
                return None
            if work is None:
                text = "this process cannot submit the run as a new job"
                raise ConfigError("cluster", job.cluster.name, text)
            with Ownership(verify_gone) as ownership:
                ownership.take(folder)
                (new_id,) = submit_owned(job, ownership, [work], "requeued", facts)
    except (ConfigError, OSError) as refusal:
        return "no requeue, " + "; ".join(filter(None, (error, str(refusal))))
    report(f"no requeue, {error}; the run continues as job {new_id}")
    return None


def hand_over(folder: RunFolder) -> None:
    """Record that the next job of the chain continues the run.

    Do nothing if the run is over or this job itself restarts.
    """
    status = folder.read_status()
    record = JobRecord.read(folder)
    job_id = record.next_job
    if job_id is None or record.is_over or status.get("state") == "requeued":
        return
    record = record.with_requeue(str(status.get("cause")), CHAIN, status.get("stopped_step"))
    count = len(record.requeues)
    folder.change_status(status, "requeued", job_id=job_id, requeue_count=count)
    report(f"the run continues as job {job_id}, the next of its chain")


def end_saved_run(
    folder: RunFolder,
    job: JobSpec,
    facts: dict[str, Any],
    stopped: dict[str, Any],
    is_killed: bool,
    work: Work | None,
) -> str:
    """Requeue the job of a saved run if SLURM made it stop.

    Write status.json, report the state and return it. The state is `requeued`, `cancelled`, or
    `stopped` if a user requested that or the run must not restart. `stopped` is the content of
    stopped.json, and `facts` are further fields for status.json. `is_killed` means that this
    process received SIGTERM too; such a job is requeued only if SLURM gives a reason other than a
    user. `work` is what a new job runs if SLURM refuses to requeue this one.
    """
    step = stopped.get("step")
    reason = str(stopped.get("reason", ""))
    facts = facts | {"stopped_step": step}
    own = own_job() if job.is_batch else None
    if not job.is_batch:
        why: str | None = None
    elif is_killed or (own is not None and own.state != "RUNNING"):
        why = kill_reason()
    else:
        why = stop_cause(own, job.cluster, reason)
    saved = f"saved before step {step} and stopped ({why or reason})"
    if why == FailureCause.CANCELLED or folder.cancelled_json.exists():
        cause = f"{DESCRIPTIONS[FailureCause.CANCELLED]}; it had saved before step {step}"
        folder.write_status("cancelled", **facts, exit_code=CANCELLED_CODE, cause=cause)
        report(f"the run {cause}")
        return "cancelled"
    facts |= {"exit_code": 0}
    if will_restart(own):
        record = JobRecord.read(folder).with_requeue(why or slurm_jobs.REQUEUED, SLURM, step)
        facts |= {"requeue_count": len(record.requeues), "cause": saved}
        folder.write_status("requeued", **facts)
        report(f"the run {saved}; SLURM starts it again")
        return "requeued"
    error = None
    if why is not None:
        error = requeue_refusal(folder, job.cluster, why) or requeue_run(
            folder, job, facts | {"cause": saved}, why, step, work
        )
        if error is None:
            report(f"the run {saved}; it starts again by itself")
            return "requeued"
    cause = f"{saved}; {error}" if error else saved
    folder.write_status("stopped", **facts, cause=cause)
    report(f"the run {cause}; the same command resumes at step {step}")
    return "stopped"


def describe_killed_run(
    folder: RunFolder, job: JobSpec, failure: Failure, ended: Ended
) -> tuple[str, Failure]:
    """Return the state of a run that was killed before it saved, and its completed failure.

    The failure then tells who ended the run and why.
    """
    if folder.cancelled_json.exists():
        what = DESCRIPTIONS[FailureCause.CANCELLED]
        return "cancelled", replace(failure, what=what, cause_class=FailureCause.CANCELLED)
    if not job.is_batch:
        return "failed", failure
    why = kill_reason()
    own = own_job()
    if (node := slurm_jobs.failed_node(ended.tail)) is not None:
        why = FailureCause.NODE
        failure = replace(failure, node=node)
    if isinstance(why, FailureCause):
        failure = replace(failure, cause_class=why)
    what = DESCRIPTIONS.get(
        why, failure.what if why is None else f"was ended by {title(own_job_id())}: {why}"
    )
    if will_restart(own):
        return "requeued", replace(failure, what=f"{what}; SLURM starts it again")
    return "cancelled" if why == FailureCause.CANCELLED else "failed", replace(failure, what=what)

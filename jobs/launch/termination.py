"""The end of a run that somebody wanted: saved and stopped, put back into the queue, preempted, cancelled, out of time."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import Any

from gems.config.schema import RunSpec
from gems.launch.local_launcher import Ended
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from jobs.launch import requeue
from jobs.launch.requeue import CANCELLED, NODE_FAILED, OUT_OF_TIME, PREEMPTED, PUT_BACK, SLURM
from jobs.diagnosis.root_cause import SIGNAL_BASE, Failure, read_records
from jobs.slurm.resources import JobSpec

CANCELLED_CODE = SIGNAL_BASE + signal.SIGTERM
WHAT = {
    PREEMPTED: "was preempted",
    CANCELLED: "was cancelled",
    OUT_OF_TIME: "used up its time",
    NODE_FAILED: "lost a node",
}


def read_stopped(folder: RunFolder) -> dict[str, Any] | None:
    """Return what rank 0 wrote when all had saved and stopped; None where they have not."""
    if read_records(folder):
        return None
    try:
        return read_json(folder.stopped_json) or None
    except (OSError, ValueError):
        return None


def go_on(
    folder: RunFolder, spec: RunSpec, job: JobSpec, facts: dict[str, Any], stopped: dict[str, Any], is_killed: bool
) -> str:
    """Put the job of a saved run back into the queue where SLURM made it stop; writes status.json and says it.

    Gives the state: requeued, stopped where a user asked or the run is not to start again, cancelled. A job that is
    being ended (`is_killed`: SIGTERM came to this process too) goes on only where SLURM says that no user ended it.
    """
    step, reason = stopped.get("step"), str(stopped.get("reason", ""))
    facts = facts | {"stopped_step": step}
    now = requeue.own_job() if job.is_batch else None
    if is_killed or (now is not None and not now.is_running):
        why = requeue.why_killed() if job.is_batch else None
    else:
        why = requeue.why_stopped(now, spec.cluster, reason) if job.is_batch else None
    saved = f"saved before step {step} and stopped ({why or reason})"
    if why == CANCELLED or folder.cancelled_json.exists():
        cause = f"{WHAT[CANCELLED]}; it had saved before step {step}"
        folder.write_status("cancelled", **facts, exit_code=CANCELLED_CODE, cause=cause)
        _say(cause)
        return "cancelled"
    facts |= {"exit_code": 0}
    if now is not None and now.is_put_back:
        count = requeue.note_requeue(folder, why or PUT_BACK, SLURM, step)
        folder.write_status("requeued", **facts | {"requeue_count": count, "cause": saved})
        _say(f"{saved}; SLURM starts it again")
        return "requeued"
    trouble = requeue.refusal(folder, spec.cluster, why) if why is not None else None
    if why is not None and trouble is None:
        trouble = requeue.put_back(folder, spec, job, facts | {"cause": saved}, why, step)
        if trouble is None:
            _say(f"{saved}; it starts again by itself")
            return "requeued"
    cause = f"{saved}; {trouble}" if trouble else saved
    folder.write_status("stopped", **facts, cause=cause)
    _say(f"{cause}; the same command goes on from step {step}")
    return "stopped"


def of_killed(folder: RunFolder, job: JobSpec, failure: Failure, ended: Ended) -> tuple[str, Failure]:
    """Report by whom and why a run was ended that has not saved: the state, and the failure in words."""
    if folder.cancelled_json.exists():
        return "cancelled", replace(failure, what=WHAT[CANCELLED])
    if not job.is_batch:
        return "failed", failure
    why, now = requeue.why_killed(), requeue.own_job()
    node = requeue.failed_node(ended.tail)
    if node is not None:
        why, failure = NODE_FAILED, replace(failure, node=node)
    what = WHAT.get(why or "", failure.what if why is None else f"was ended by SLURM: {why}")
    if now is not None and now.is_put_back:
        return "requeued", replace(failure, what=f"{what}; SLURM starts it again")
    return "cancelled" if why == CANCELLED else "failed", replace(failure, what=what)


def _say(text: str) -> None:
    print(f"jobs: the run {text}", file=sys.stderr, flush=True)

"""End a run on request: a signal to save and stop, then the run is requeued, preempted, cancelled or out of time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from gems.config.schema import RunSpec
from gems.errors import SIGNAL_BASE
from gems.launch.local_launcher import Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import write_json
from gems.utils.stdio import report
from gems.utils.units import now_utc
from jobs.diagnosis.root_cause import Failure, read_records
from jobs.launch import own_job
from jobs.slurm.messages import REQUEUED, failed_node
from jobs.slurm.resources import JobSpec
from jobs.status.run_status import read_or_empty

CANCELLED_CODE = SIGNAL_BASE + signal.SIGTERM
DESCRIPTIONS: dict[str | None, str] = {
    FailureCause.PREEMPTED: "was preempted", FailureCause.CANCELLED: "was cancelled",
    FailureCause.TIME_LIMIT: "reached its time limit", FailureCause.NODE: "lost a node",
}  # fmt: skip


class StopRequest:
    """Notes SIGUSR2 while it is entered, and passes it on to the ranks through stop.json.

    Entered by another than the main thread it notes nothing, as Python allows no handlers there.
    """

    def __init__(self) -> None:
        self.is_noted = False
        self._is_passed_on = False
        self._before: object = None
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)  # type: ignore[arg-type]

    def pass_on(self, folder: RunFolder) -> None:
        """Write stop.json once the signal has come; the ranks stop at the end of a step."""
        if not self.is_noted or self._is_passed_on:
            return
        by = f"launcher {os.getpid()} on {os.uname().nodename}"
        with contextlib.suppress(OSError):  # the file system may be back at the next call
            write_json(folder.stop_json, {"reason": signal.SIGUSR2.name, "utc": now_utc("milliseconds"), "by": by})
            self._is_passed_on = True

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.is_noted = True


def read_stopped(folder: RunFolder) -> dict[str, Any] | None:
    """Return what rank 0 wrote when all ranks had saved and stopped; None if they have not."""
    return None if read_records(folder) else read_or_empty(folder.stopped_json) or None


def end_saved_run(
    folder: RunFolder, spec: RunSpec, job: JobSpec, facts: dict[str, Any], stopped: dict[str, Any], is_killed: bool,
    work: Callable[[], None] | None,
) -> str:  # fmt: skip
    """Requeue the job of a saved run if SLURM made it stop; write status.json and report it.

    `stopped` is the content of stopped.json, and `facts` what else goes to status.json. `is_killed` tells that SIGTERM
    came to this process too; such a job is requeued only if SLURM tells that no user ended it. `work` is what a new job
    calls if SLURM refuses to requeue this one.

    Returns:
        The state: requeued, cancelled, or stopped if a user wanted that or the run is not to start again.
    """
    step, reason = stopped.get("step"), str(stopped.get("reason", ""))
    facts = facts | {"stopped_step": step}
    own = own_job.own_job() if job.is_batch else None
    if not job.is_batch:
        why: str | None = None
    elif is_killed or (own is not None and own.state != "RUNNING"):
        why = own_job.kill_reason()
    else:
        why = own_job.stop_cause(own, spec.cluster, reason)
    saved = f"saved before step {step} and stopped ({why or reason})"
    if why == FailureCause.CANCELLED or folder.cancelled_json.exists():
        cause = f"{DESCRIPTIONS[FailureCause.CANCELLED]}; it had saved before step {step}"
        folder.write_status("cancelled", **facts, exit_code=CANCELLED_CODE, cause=cause)
        report("jobs", f"the run {cause}")
        return "cancelled"
    facts |= {"exit_code": 0}
    if own_job.will_restart(own):
        count = own_job.add_requeue(folder, why or REQUEUED, own_job.SLURM, step)
        folder.write_status("requeued", **facts | {"requeue_count": count, "cause": saved})
        report("jobs", f"the run {saved}; SLURM starts it again")
        return "requeued"
    error = None
    if why is not None:
        error = own_job.requeue_refusal(folder, spec.cluster, why) or own_job.requeue_run(
            folder, spec, job, facts | {"cause": saved}, why, step, work
        )
        if error is None:
            report("jobs", f"the run {saved}; it starts again by itself")
            return "requeued"
    cause = f"{saved}; {error}" if error else saved
    folder.write_status("stopped", **facts, cause=cause)
    report("jobs", f"the run {cause}; the same command resumes at step {step}")
    return "stopped"


def describe_killed_run(folder: RunFolder, job: JobSpec, failure: Failure, ended: Ended) -> tuple[str, Failure]:
    """Return the state of a run that was ended before it had saved, and the failure with who ended it and why."""
    if folder.cancelled_json.exists():
        what = DESCRIPTIONS[FailureCause.CANCELLED]
        return "cancelled", replace(failure, what=what, cause_class=FailureCause.CANCELLED)
    if not job.is_batch:
        return "failed", failure
    why, own = own_job.kill_reason(), own_job.own_job()
    if (node := failed_node(ended.tail)) is not None:
        why, failure = FailureCause.NODE, replace(failure, node=node)
    if isinstance(why, FailureCause):
        failure = replace(failure, cause_class=why)
    what = DESCRIPTIONS.get(why, failure.what if why is None else f"was ended by SLURM: {why}")
    if own_job.will_restart(own):
        return "requeued", replace(failure, what=f"{what}; SLURM starts it again")
    return "cancelled" if why == FailureCause.CANCELLED else "failed", replace(failure, what=what)

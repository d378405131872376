"""The status of runs: what their folders record, joined with what SLURM knows of their jobs."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import SIGNAL_BASE, ConfigError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import FINISHED, read_beats
from gems.utils.atomic_io import read_json
from gems.utils.process_tree import is_alive
from jobs.slurm.jobs import PENDING, SACCT, SQUEUE, STARTING, Job, JobQuery, is_job_number, query_jobs

MISSING, UNREADABLE = "missing", "unreadable"
WAITING = ("submitted", "requeued")
UNFINISHED = (*WAITING, "running")  # states in status.json of a run that has not recorded its end
ACTIVE = (*UNFINISHED, "pending", "starting", "stalled")
FOLDER, PROCESS, BEATS = "status.json", "process", "heartbeats"
STALLED_AFTER_S = 120.0  # an action of a step takes less; loading, saving and starting may take as long as allowed
SLOW = ("start", "load", "begin", "checkpoint")


@dataclass(frozen=True, slots=True)
class RecordedStatus:
    """What a run folder alone records; None for what it does not. `sources` names the source of a guessed figure.

    `sign_ns` is the last sign of life.
    """

    folder: RunFolder
    status: Mapping[str, Any]
    step: int | None = None
    steps: int | None = None
    images_per_s: float | None = None
    loss: float | None = None
    sign_ns: int | None = None
    action: str | None = None
    has_ranks: bool = False
    are_ranks_done: bool = False
    hang_timeout_s: float = math.inf
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """The state in status.json."""
        return str(self.status.get("state", MISSING))

    @property
    def job_id(self) -> str | None:
        """The job's number; None if there is no job, or the file holds something else."""
        number = self.status.get("job_id")
        return str(number) if is_job_number(number) else None

    @property
    def cause(self) -> str:
        """Why the run ended."""
        return " ".join(str(self.status.get("cause", "")).split())

    @property
    def may_be_queued(self) -> bool:
        """Whether SLURM may still have the job, or again: one that was stopped may have been put back."""
        code = self.status.get("exit_code")
        is_stopped = self.state == "failed" and isinstance(code, int) and code > SIGNAL_BASE
        return self.job_id is not None and (self.state in UNFINISHED or is_stopped)

    def age_s(self, now_ns: int) -> float | None:
        """Return the seconds since the last sign of life; clocks of nodes differ, so never less than 0."""
        return None if self.sign_ns is None else max(0.0, (now_ns - self.sign_ns) / 1e9)

    def is_stalled(self, now_ns: int) -> bool:
        """Return whether the run has shown no sign of life for too long."""
        age_s = self.age_s(now_ns)
        return age_s is not None and not self.are_ranks_done and age_s > self.hang_timeout_s


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run: prepared, pending, starting, running, stalled, stopped, finished, failed, cancelled, lost...

    A stopped run has saved its state on request. "submitted" and "requeued" are the states of runs whose job SLURM was
    not asked for. `source` tells where the state is from; with `is_guess` SLURM did not confirm it.
    """

    recorded: RecordedStatus
    state: str
    source: str
    is_guess: bool = False
    note: str = ""
    start_utc: datetime | None = None
    job_name: str | None = None
    age_s: float | None = None

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self.recorded.folder

    @property
    def is_active(self) -> bool:
        """Whether the run waits or goes on, as far as is known."""
        return self.state in ACTIVE

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the status for a program."""
        recorded, path = self.recorded, self.folder.path
        return {
            "name": path.name, "run_folder": str(path), "state": self.state,
            **{key: getattr(recorded, key) for key in ("job_id", "step", "steps", "images_per_s", "loss")},
            "beat_age_s": self.age_s, "note": self.note,
            "start_utc": self.start_utc.isoformat() if self.start_utc else None,
            "sources": {"state": self.source, **recorded.sources}, "is_guess": self.is_guess,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunStatuses:
    """The status of some runs, and the errors of SLURM's commands."""

    runs: tuple[RunStatus, ...]
    errors: tuple[str, ...] = ()


def run_statuses(folders: Sequence[RunFolder]) -> RunStatuses:
    """Return the status of runs, by one squeue for all of them, and one sacct for the jobs that it does not know.

    A folder whose job seems to have gone is read again: the run may have ended between the two reads.
    """
    read = [read_recorded(folder) for folder in folders]
    job_ids = [recorded.job_id for recorded in read if recorded.may_be_queued and recorded.job_id]
    queue = query_jobs(job_ids, SQUEUE)
    accounting = query_jobs([number for number in job_ids if number not in queue.jobs], SACCT)
    read = [recorded if _is_current(recorded, queue) else read_recorded(recorded.folder) for recorded in read]
    errors = tuple(query.error for query in (queue, accounting) if query.error is not None)
    now_ns = time.time_ns()
    return RunStatuses(tuple(_status(recorded, queue, accounting, now_ns) for recorded in read), errors)


def read_recorded(folder: RunFolder) -> RecordedStatus:
    """Read what a run folder records; damaged files raise nothing."""
    status = read_status(folder)
    if status.get("state") == UNREADABLE:
        return RecordedStatus(folder, status)
    is_open = status.get("state") in (*UNFINISHED, "prepared")
    spec = read_spec(folder) if is_open else None
    progress, result = read_or_empty(folder.progress_json), read_or_empty(folder.result_json)
    beats = read_beats(folder.path) if is_open else {}
    newest = max(beats.values(), key=lambda beat: beat.time_ns, default=None)
    step, steps, sources = whole(progress.get("step")), whole(progress.get("steps")), {}
    if step is None and newest is not None and newest.step >= 0:
        step, sources["step"] = max(beat.step for beat in beats.values()), "heartbeats"
    if step is None and (step := whole(result.get("num_steps"))) is not None:
        steps, sources["step"] = step, "result.json"
    if steps is None and spec is not None:
        steps = spec.train.steps
    signs = [whole(progress.get("time_ns")), newest.time_ns if newest is not None else None]
    if not beats and is_open:
        signs.append(utc_ns(status.get("updated_utc")))
    is_slow = newest is None or newest.step < 0 or newest.action in SLOW
    limit_s = spec.train.hang_timeout_s if spec is not None else STALLED_AFTER_S
    return RecordedStatus(
        folder=folder,
        status=status,
        step=step,
        steps=steps,
        images_per_s=_number(progress.get("images_per_s", result.get("images_per_s"))),
        loss=_number(progress.get("loss", result.get("last_loss"))),
        sign_ns=max((sign for sign in signs if sign is not None), default=None),
        action=newest.action if newest is not None else None,
        has_ranks=bool(beats),
        are_ranks_done=bool(beats) and all(beat.action == FINISHED for beat in beats.values()),
        hang_timeout_s=limit_s if is_slow else min(STALLED_AFTER_S, limit_s),
        sources=sources,
    )


def read_status(folder: RunFolder) -> Mapping[str, Any]:
    """Read status.json; a state of its own stands for a damaged or forbidden one."""
    try:
        return folder.read_status()
    except (ConfigError, OSError) as error:
        return {"state": UNREADABLE, "cause": str(error)}


def is_alive_here(record: Mapping[str, Any]) -> bool | None:
    """Return whether the process that a file names by pid, start and host is alive; None on another host."""
    if record.get("host") != os.uname().nodename:
        return None
    pid, started = record.get("pid"), record.get("pid_started")
    if not isinstance(pid, int) or pid <= 0:
        return False
    return is_alive(pid, str(started)) if started else Path(f"/proc/{pid}").exists()


def _is_current(recorded: RecordedStatus, queue: JobQuery) -> bool:
    if recorded.state not in UNFINISHED:
        return True
    job = queue.jobs.get(recorded.job_id or "")
    return job is not None and job.is_active


def _status(recorded: RecordedStatus, queue: JobQuery, accounting: JobQuery, now_ns: int) -> RunStatus:
    state = recorded.state
    if recorded.may_be_queued and recorded.job_id is not None:
        job = queue.jobs.get(recorded.job_id) or accounting.jobs.get(recorded.job_id)
        if job is not None and not (job.source == SACCT and job.is_active and queue.error is None):
            status = _from_job(recorded, job, now_ns)
            return replace(status, start_utc=job.start_utc if status.state == "pending" else None, job_name=job.name)
        if state in UNFINISHED:
            return _without_job(recorded, queue.error, now_ns)
    if state == "running":
        return _from_process(recorded, now_ns)
    if state == "prepared" and recorded.has_ranks:
        return _from_ranks(recorded, now_ns, "started by hand")
    if state == "finished" and recorded.status.get("exit_code"):
        return RunStatus(recorded, "failed", FOLDER, note=recorded.cause or "its traces could not be collected")
    return RunStatus(recorded, state, FOLDER, note=recorded.cause)


def _from_job(recorded: RecordedStatus, job: Job, now_ns: int) -> RunStatus:
    """Judge by a job that SLURM knows; the end that the run recorded counts, unless it is to start again."""
    if job.state in PENDING:
        again = "" if recorded.state == "submitted" else " (to start again)"
        return RunStatus(recorded, "pending", job.source, note=f"{job.reason}{again}".strip())
    if recorded.state not in UNFINISHED:
        state, source = ("cancelled", job.source) if job.state == "CANCELLED" else (recorded.state, FOLDER)
        return RunStatus(recorded, state, source, note=recorded.cause)
    if job.is_active and recorded.state in WAITING:
        note = "its nodes are made ready" if job.state in STARTING else job.state.lower()
        return RunStatus(recorded, "starting", job.source, note=note)
    if job.is_active:
        return _alive(recorded, job.source, now_ns, "" if job.state == "RUNNING" else job.state.lower())
    if job.state == "CANCELLED" or recorded.folder.cancelled_json.exists():
        return RunStatus(recorded, "cancelled", job.source, note="the job was cancelled")
    if job.state == "COMPLETED":
        return RunStatus(recorded, "lost", job.source, note="the job has ended, and the run recorded no end")
    reason = f" ({job.reason})" if job.reason else ""
    return RunStatus(recorded, "failed", job.source, note=f"the job ended as {job.state}{reason}")


def _without_job(recorded: RecordedStatus, error: str | None, now_ns: int) -> RunStatus:
    """Judge a run whose job SLURM does not know, or if SLURM does not answer."""
    if error is None:
        return _gone(recorded, SQUEUE, "SLURM does not know the job any more")
    if recorded.state in WAITING:
        return RunStatus(recorded, recorded.state, FOLDER, is_guess=True)
    return _from_ranks(recorded, now_ns, "")


def _from_process(recorded: RecordedStatus, now_ns: int) -> RunStatus:
    """Judge a run that is no job by its process, or on another host by its heartbeats."""
    is_here = is_alive_here(recorded.status)
    if is_here:
        return _alive(recorded, PROCESS, now_ns)
    if is_here is None:
        return _from_ranks(recorded, now_ns, f"on {recorded.status.get('host', 'another host')}")
    return _gone(recorded, PROCESS, f"its process {recorded.status.get('pid')} has gone")


def _from_ranks(recorded: RecordedStatus, now_ns: int, note: str) -> RunStatus:
    """Judge by the heartbeats alone."""
    if recorded.are_ranks_done and recorded.state == "prepared":
        return RunStatus(recorded, "finished", BEATS, is_guess=True, note=note)
    return replace(_alive(recorded, BEATS, now_ns, note), is_guess=True)


def _alive(recorded: RecordedStatus, source: str, now_ns: int, note: str = "") -> RunStatus:
    age_s = recorded.age_s(now_ns)
    if recorded.is_stalled(now_ns):
        where = f"no rank has moved for {age_s:.0f} s"
        where += f", the last in {recorded.action}" if recorded.action else ""
        return RunStatus(recorded, "stalled", source, note=where, age_s=age_s)
    return RunStatus(recorded, "running", source, note=note, age_s=age_s)


def _gone(recorded: RecordedStatus, source: str, note: str) -> RunStatus:
    state = "cancelled" if recorded.folder.cancelled_json.exists() else "lost"
    return RunStatus(recorded, state, source, note=note)


def read_spec(folder: RunFolder) -> RunSpec | None:
    """Read the run's configuration; None if it is damaged."""
    with contextlib.suppress(ConfigError, TypeError):
        return folder.read_spec()
    return None


def read_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object; a damaged or forbidden one counts as empty."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return {}


def whole(value: object) -> int | None:
    """Return a whole number from a file; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def utc_ns(text: object) -> int | None:
    """Return a time from a file in ns; None if it is none."""
    with contextlib.suppress(ValueError, OverflowError):
        return int(datetime.fromisoformat(str(text)).timestamp() * 1e9)
    return None

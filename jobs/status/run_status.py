"""Determine the status of runs from their folders' records and SLURM's view of their jobs."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gems.config.schema import RunSpec
from gems.errors import SIGNAL_BASE, ConfigError
from gems.runs.folder import RunFolder, describe_change
from gems.runs.heartbeat import FINISHED, Beat, read_beats
from gems.runs.owner import SUBMITTING, UNFINISHED, is_alive_here
from jobs.batch.command import SchedulerError
from jobs.batch.job import ACTIVE as JOB_ACTIVE
from jobs.batch.job import PENDING, STARTING, SUSPENDED, Job, JobQuery
from jobs.schedulers.scheduler import (
    is_job_id,
    query_accounting,
    query_queue,
    scheduler_at,
    system_of,
)
from jobs.status.job_record import JobRecord, complete_submissions, read_chain, read_or_empty

MISSING = "missing"
UNREADABLE = "unreadable"
WAITING = ("submitted", "requeued")
ACTIVE = (*UNFINISHED, "pending", "starting", "suspended", "stalled")
FOLDER = "status.json"
PROCESS = "process"
BEATS = "heartbeats"
# an action of a step takes less time; loading, saving and starting may take as long as allowed
STALLED_AFTER_S = 120.0
LOOK_AGAIN_S = 2.5  # running ranks show a sign of life every second
SLOW = ("start", "load", "begin", "checkpoint")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run, such as prepared, pending, starting, running, stalled or finished.

    Other states include stopped, failed, cancelled and lost. A stopped run has saved its state on
    request. "submitted" and "requeued" are the states of runs for whose job SLURM was not queried.
    `source` is where the state comes from; with `is_guess`, SLURM did not confirm it. `status` is
    the content of status.json, `sign_ns` the last progress, and `beats` the heartbeats of an open
    run. Unknown values are None. `sources` names the source of a guessed figure. `error` is a
    problem that the ranks report although the run continues, such as failing saves. `layouts` are
    the layouts that the run has had after its own.
    """

    folder: RunFolder
    status: Mapping[str, Any]
    state: str
    source: str = FOLDER
    is_guess: bool = False
    note: str = ""
    step: int | None = None
    steps: int | None = None
    images_per_s: float | None = None
    loss: float | None = None
    sign_ns: int | None = None
    beats: Mapping[int, Beat] = field(default_factory=dict)
    hang_timeout_s: float = math.inf
    sources: Mapping[str, str] = field(default_factory=dict)
    start_utc: datetime | None = None
    job_name: str | None = None
    age_s: float | None = None
    error: str = ""
    layouts: Sequence[Mapping[str, Any]] = ()

    @property
    def newest(self) -> Beat | None:
        """The heartbeat of the last new action; None before the ranks of an open run have one."""
        return max(self.beats.values(), key=lambda beat: beat.time_ns, default=None)

    @property
    def are_ranks_done(self) -> bool:
        """Whether all ranks of an open run have finished."""
        return bool(self.beats) and all(beat.action == FINISHED for beat in self.beats.values())

    @property
    def still_s(self) -> float:
        """Seconds without a new action on any rank, at the last sign of life.

        They are measured by the clock that the ranks share.
        """
        if self.newest is None:
            return 0.0
        alive_ns = max(beat.alive_ns for beat in self.beats.values())
        return max(0.0, (alive_ns - self.newest.time_ns) / 1e9)

    @property
    def layout_note(self) -> str:
        """The change that led to the run's current layout; empty if the run has its own layout."""
        last = self.layouts[-1] if self.layouts else {}
        return describe_change(last) if last.get("number", 1) != 1 else ""

    @property
    def reason(self) -> str:
        """The note, with the estimated start of a job that waits."""
        start = "" if self.start_utc is None else f"starts about {_format_start(self.start_utc)}"
        return ", ".join(filter(None, (self.note, start)))

    @property
    def recorded_state(self) -> str:
        """The state in status.json."""
        return str(self.status.get("state", MISSING))

    @property
    def job_id(self) -> str | None:
        """The job's number; None if there is no job, or the file holds something else."""
        number = self.status.get("job_id")
        return str(number) if is_job_id(number) else None

    @property
    def cause(self) -> str:
        """Why the run ended, according to status.json."""
        return " ".join(str(self.status.get("cause", "")).split())

    @property
    def may_be_queued(self) -> bool:
        """Whether SLURM may still have the job, or may have it again.

        A stopped job may have been requeued.
        """
        state = self.recorded_state
        code = self.status.get("exit_code")
        is_stopped = state == "failed" and (code or 0) > SIGNAL_BASE
        return self.job_id is not None and (state in UNFINISHED or is_stopped)

    @property
    def is_active(self) -> bool:
        """Whether the run waits or runs, as far as is known."""
        return self.state in ACTIVE

    def to_dict(self) -> dict[str, Any]:
        """Return the status as a dictionary for programs."""
        path = self.folder.path
        names = (
            "state",
            "job_id",
            "step",
            "steps",
            "images_per_s",
            "loss",
            "note",
            "is_guess",
            "error",
        )
        return {
            "name": path.name,
            "run_folder": str(path),
            **{name: getattr(self, name) for name in names},
            "layouts": list(self.layouts),
            "beat_age_s": self.age_s,
            "start_utc": self.start_utc.isoformat() if self.start_utc else None,
            "sources": {"state": self.source, **self.sources},
        }


class RunStatuses(NamedTuple):
    """The status of some runs, and the errors of SLURM's commands."""

    runs: tuple[RunStatus, ...]
    errors: tuple[str, ...]


def run_statuses(folders: Sequence[RunFolder]) -> RunStatuses:
    """Return the status of runs, with one squeue for all, and one sacct for unknown jobs.

    A folder whose job seems to be gone is read again: the run may have ended between the two reads.
    Interrupted submissions are completed first, which takes one more squeue.
    """
    read = [read_recorded(folder) for folder in folders]
    doubt = None
    if submitting := [index for index, run in enumerate(read) if run.state == SUBMITTING]:
        doubt = _complete([read[index].folder for index in submitting])
        for index in submitting:
            read[index] = read_recorded(read[index].folder)
    chains = {
        run.folder.path: chain
        for run in read
        if run.may_be_queued and (chain := read_chain(run.folder))
    }
    job_ids = [run.job_id for run in read if run.may_be_queued and run.job_id]
    job_ids += [job_id for chain in chains.values() for job_id in chain]
    queue = query_queue(job_ids)
    accounting = query_accounting([number for number in job_ids if number not in queue.jobs])
    for index, run in enumerate(read):
        job = queue.jobs.get(run.job_id or "")
        if run.recorded_state in UNFINISHED and (job is None or not job.is_active):
            fresh = read[index] = read_recorded(run.folder)
            chain = chains.get(run.folder.path, [])
            active = [each for each in chain if each in queue.jobs and queue.jobs[each].is_active]
            # the job was killed before it could name the next of its chain
            if active and fresh.may_be_queued:
                read[index] = replace(
                    fresh, status={**fresh.status, "job_id": active[0]}, state=WAITING[1]
                )
    errors = tuple(query.error for query in (queue, accounting) if query.error is not None)
    runs = (
        _submission(run, doubt) if run.state == SUBMITTING else _judged(run, queue, accounting)
        for run in read
    )
    return RunStatuses(_look_again(list(runs)), errors)


def _complete(folders: Sequence[RunFolder]) -> str | None:
    """Complete interrupted submissions; return why it is unknown whether there is a job."""
    try:
        complete_submissions(folders)
    except SchedulerError as error:
        return str(error)
    return None


def _submission(run: RunStatus, doubt: str | None) -> RunStatus:
    """Judge a run whose process wrote that it submits, but not yet which job."""
    where = f"process {run.status.get('pid') or ''} on {run.status.get('host')}"
    is_here = is_alive_here(run.status)
    if is_here or is_here is None:
        return replace(run, source=PROCESS, is_guess=is_here is None, note=f"by {where}")
    scheduler = scheduler_at(JobRecord.read(run.folder).system)
    system = scheduler.title if scheduler is not None else "the batch system"
    if doubt is not None:
        return replace(
            run,
            is_guess=True,
            note=f"{where} has gone; cannot determine whether {system} accepted the job",
        )
    return _gone(run, PROCESS, f"{where} ended before {system} had the job")


def _look_again(runs: Sequence[RunStatus]) -> tuple[RunStatus, ...]:
    """Read the heartbeats of seemingly stalled runs once more.

    Nodes' clocks may differ from ours by any amount.
    """
    suspects = {run.folder.path for run in runs if run.state == "stalled" and run.beats}
    if suspects:
        time.sleep(LOOK_AGAIN_S)
    judged = []
    for run in runs:
        if run.folder.path in suspects and (beats := read_beats(run.folder.path)) != run.beats:
            moved = replace(run, beats=beats)
            run = _by_age(moved, run.source, "", moved.still_s)
        judged.append(run)
    return tuple(judged)


def read_recorded(folder: RunFolder) -> RunStatus:
    """Read only what a run folder records; damaged files raise nothing."""
    status = read_status(folder)
    run = RunStatus(folder, status, str(status.get("state", MISSING)), layouts=_layouts(folder))
    run = replace(run, note=run.cause)
    if run.state == UNREADABLE:
        return run
    progress = read_or_empty(folder.progress_json)
    result = read_or_empty(folder.result_json)
    step = progress.get("step")
    steps = progress.get("steps")
    signs = [progress.get("time_ns")]
    spec = None
    error = ""
    sources = {}
    if run.state in (*UNFINISHED, "prepared"):
        run = replace(run, beats=read_beats(folder.path))
        spec = read_spec(folder)
        error = " ".join(str(progress.get("error") or "").split())
        newest = run.newest
        signs.append(utc_ns(status.get("updated_utc")) if newest is None else newest.time_ns)
        if step is None and newest is not None and newest.step >= 0:
            step, sources["step"] = max(beat.step for beat in run.beats.values()), BEATS
    if step is None and (step := result.get("num_steps")) is not None:
        steps, sources["step"] = step, "result.json"
    limit_s = STALLED_AFTER_S
    if spec is not None:
        steps = spec.train.steps if steps is None else steps
        limit_s = spec.train.hang_timeout_s
    is_slow = run.newest is None or run.newest.step < 0 or run.newest.action in SLOW
    return replace(
        run,
        step=step,
        steps=steps,
        sources=sources,
        images_per_s=_finite(progress.get("images_per_s", result.get("images_per_s"))),
        loss=_finite(progress.get("loss", result.get("last_loss"))),
        sign_ns=max((sign for sign in signs if sign is not None), default=None),
        hang_timeout_s=limit_s if is_slow else min(STALLED_AFTER_S, limit_s),
        error=error,
    )


def _layouts(folder: RunFolder) -> list[dict[str, Any]]:
    """Read the layouts that the run has had after its own; a damaged file counts as empty."""
    with contextlib.suppress(ConfigError, OSError):
        return folder.layouts()
    return []


def read_status(folder: RunFolder) -> Mapping[str, Any]:
    """Read status.json; a damaged or unreadable file has a special state."""
    try:
        return folder.read_status()
    except (ConfigError, OSError) as error:
        return {"state": UNREADABLE, "cause": str(error)}


def _judged(run: RunStatus, queue: JobQuery, accounting: JobQuery) -> RunStatus:
    """Return the status by SLURM, the process or the heartbeats; `run` is the recorded status."""
    if run.may_be_queued and run.job_id is not None:
        job = queue.jobs.get(run.job_id)
        if job is None:
            ended = accounting.jobs.get(run.job_id)
            # the queue would know a job that is active
            is_stale = ended is not None and ended.is_active and queue.error is None
            job = None if is_stale else ended
        if job is not None:
            status = _from_job(run, job)
            return replace(
                status,
                start_utc=job.start_utc if status.state == "pending" else None,
                job_name=job.name,
            )
        if run.state in UNFINISHED and queue.error is None:
            system = system_of(run.job_id)
            return _gone(
                run, system.queue_program, f"{system.title} does not know the job any more"
            )
        if run.state in WAITING:
            return replace(run, is_guess=True, note="")
        if run.state in UNFINISHED:
            return _from_ranks(run, "")
    if run.state == "running":
        is_here = is_alive_here(run.status)
        if is_here:
            return _alive(run, PROCESS)
        if is_here is None:
            return _from_ranks(run, f"on {run.status.get('host', 'another host')}")
        return _gone(run, PROCESS, f"its process {run.status.get('pid')} has gone")
    if run.state == "prepared" and run.beats:
        return _from_ranks(run, "started by hand")
    if run.state == "finished" and run.status.get("exit_code"):
        return replace(run, state="failed", note=run.cause or "its traces could not be collected")
    return run


def _from_job(run: RunStatus, job: Job) -> RunStatus:
    """Judge by a job that SLURM knows.

    An end that the run recorded counts, unless the run will restart.
    """
    if job.state in PENDING:
        again = "" if run.state == "submitted" else " (to start again)"
        reason = system_of(str(run.job_id)).describe_wait(str(run.job_id), job.reason)
        return replace(run, state="pending", source=job.source, note=f"{reason}{again}".strip())
    if run.state not in UNFINISHED:
        return (
            replace(run, state="cancelled", source=job.source) if job.state == "CANCELLED" else run
        )
    known = job.state.lower() if job.state in JOB_ACTIVE else job.state
    if job.state in SUSPENDED:
        return replace(run, state="suspended", source=job.source, note=job.reason)
    if job.is_active and run.state in WAITING:
        note = "its nodes are made ready" if job.state in STARTING else known
        return replace(run, state="starting", source=job.source, note=note)
    if job.is_active:
        return _alive(run, job.source, "" if job.state == "RUNNING" else known)
    state = "failed"
    note = f"the job ended as {job.state}" + (f" ({job.reason})" if job.reason else "")
    if job.state == "CANCELLED" or run.folder.cancelled_json.exists():
        state = "cancelled"
        note = "the job was cancelled"
    elif job.state == "COMPLETED":
        state = "lost"
        note = "the job has ended, and the run recorded no end"
    return replace(run, state=state, source=job.source, note=note)


def _from_ranks(run: RunStatus, note: str) -> RunStatus:
    """Judge by the heartbeats alone."""
    if run.are_ranks_done and run.state == "prepared":
        return replace(run, state="finished", source=BEATS, is_guess=True, note=note)
    return replace(_alive(run, BEATS, note), is_guess=True)


def _alive(run: RunStatus, source: str, note: str = "") -> RunStatus:
    """Judge by the last progress.

    If the ranks' clock is ahead of ours, that hides the age of the progress, but not `still_s`.
    """
    if run.sign_ns is None:
        return replace(run, state="running", source=source, note=note, age_s=None)
    return _by_age(run, source, note, max(run.still_s, (time.time_ns() - run.sign_ns) / 1e9))


def _by_age(run: RunStatus, source: str, note: str, age_s: float) -> RunStatus:
    state = "running"
    if not run.are_ranks_done and age_s > run.hang_timeout_s:
        last = f", the last in {run.newest.action}" if run.newest is not None else ""
        state = "stalled"
        note = f"no rank has moved for {age_s:.0f} s{last}"
    return replace(run, state=state, source=source, note=note, age_s=age_s)


def _gone(run: RunStatus, source: str, note: str) -> RunStatus:
    state = "cancelled" if run.folder.cancelled_json.exists() else "lost"
    return replace(run, state=state, source=source, note=note)


def describe_states(states: Iterable[str]) -> str:
    """Describe how many runs are in each state."""
    counts = sorted(Counter(states).items())
    return ", ".join(f"{number} {state}" for state, number in counts)


def _format_start(start: datetime) -> str:
    """Format an estimated start in local time, without the date if it is today."""
    local = start.astimezone()
    today = datetime.now(UTC).astimezone().date()
    return f"{local:%H:%M}" if local.date() == today else f"{local:%Y-%m-%d %H:%M}"


def read_spec(folder: RunFolder) -> RunSpec | None:
    """Read the run's configuration; None if it is damaged."""
    with contextlib.suppress(ConfigError, TypeError):
        return folder.read_spec()
    return None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def utc_ns(text: object) -> int | None:
    """Return a time from a file in ns; None if the value is not a time."""
    with contextlib.suppress(ValueError, OverflowError):
        return int(datetime.fromisoformat(str(text)).timestamp() * 1e9)
    return None

"""The condition of runs: what their folders tell, joined with what SLURM says of their jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from gems.runs.folder import RunFolder
from jobs.slurm.jobs import PENDING, STARTING, Answer, Job, ask_accounting, ask_queue
from jobs.status.facts import GOING_ON, WAITING, Facts, lives_here, now_ns, read_facts

ACTIVE = ("submitted", "requeued", "pending", "starting", "running", "stalled")
FOLDER, QUEUE, ACCOUNTING, PROCESS, BEATS = "status.json", "squeue", "sacct", "process", "heartbeats"


@dataclass(frozen=True, slots=True)
class Condition:
    """A run as it stands: prepared, pending, starting, running, stalled, stopped, finished, failed, cancelled, lost...

    A stopped run has saved its state at somebody's request. "submitted", "requeued" and a guessed state stand where
    SLURM cannot be asked; `source` says who told the state.
    """

    facts: Facts
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
        return self.facts.folder

    @property
    def is_active(self) -> bool:
        """Whether the run waits or goes on, as far as one can know."""
        return self.state in ACTIVE

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the condition for a program."""
        facts = self.facts
        return {
            "name": facts.folder.path.name, "run_folder": str(facts.folder.path), "state": self.state,
            "job_id": facts.job_id, "step": facts.step, "steps": facts.steps, "images_per_s": facts.images_per_s,
            "loss": facts.loss, "beat_age_s": self.age_s, "note": self.note,
            "start_utc": self.start_utc.isoformat() if self.start_utc else None,
            "sources": {"state": self.source, **facts.sources}, "is_guess": self.is_guess,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of some runs, and what could not be asked."""

    runs: tuple[Condition, ...]
    troubles: tuple[str, ...] = field(default=())


def conditions(folders: Sequence[RunFolder]) -> Conditions:
    """Find the condition of runs with one squeue for all of them, and one sacct for the jobs that it does not know.

    A folder whose job seems to have gone is read again: the run may have ended between the two looks.
    """
    known = [read_facts(folder) for folder in folders]
    asked = [facts.job_id for facts in known if facts.may_be_queued and facts.job_id]
    queue = ask_queue(asked)
    gone = [number for number in asked if number not in queue.jobs]
    known = [facts if _is_there(facts, queue) else read_facts(facts.folder) for facts in known]
    accounting = ask_accounting(gone)
    troubles = [trouble for trouble in (queue.trouble, accounting.trouble) if trouble is not None]
    now = now_ns()
    return Conditions(tuple(_condition(facts, queue, accounting, now) for facts in known), tuple(troubles))


def _is_there(facts: Facts, queue: Answer) -> bool:
    if facts.state not in GOING_ON:
        return True
    job = queue.jobs.get(facts.job_id or "")
    return job is not None and job.is_active


def _condition(facts: Facts, queue: Answer, accounting: Answer, now: int) -> Condition:
    state = facts.state
    if facts.may_be_queued and facts.job_id is not None:
        job = queue.jobs.get(facts.job_id)
        if job is not None:
            return _named(_of_job(facts, job, QUEUE, now), job)
        job = accounting.jobs.get(facts.job_id)
        if job is not None and not (job.is_active and queue.trouble is None):
            return _named(_of_job(facts, job, ACCOUNTING, now), job)
        if state in GOING_ON:
            return _without_job(facts, queue.trouble, now)
    if state == "running":
        return _of_process(facts, now)
    if state == "prepared" and facts.has_ranks:
        return _of_ranks(facts, now, "started by hand")
    if state == "finished" and facts.status.get("exit_code"):
        return Condition(facts, "failed", FOLDER, note=facts.cause or "its traces could not be collected")
    return Condition(facts, state, FOLDER, note=facts.cause)


def _named(condition: Condition, job: Job) -> Condition:
    start_utc = job.start_utc if condition.state == "pending" else None
    return replace(condition, start_utc=start_utc, job_name=job.name)


def _of_job(facts: Facts, job: Job, source: str, now: int) -> Condition:
    """Judge by a job that SLURM knows; what the run itself wrote about its end stands, unless it is to start again."""
    if job.state in PENDING:
        again = "" if facts.state == "submitted" else " (to start again)"
        return Condition(facts, "pending", source, note=f"{job.reason}{again}".strip())
    if facts.state not in GOING_ON:
        is_cancelled = job.state == "CANCELLED"
        return Condition(
            facts, "cancelled" if is_cancelled else facts.state, source if is_cancelled else FOLDER, note=facts.cause
        )
    if job.is_active and facts.state in WAITING:
        note = "its nodes are made ready" if job.state in STARTING else job.state.lower()
        return Condition(facts, "starting", source, note=note)
    if job.is_active:
        return _alive(facts, source, now, "" if job.state == "RUNNING" else job.state.lower())
    if job.state == "CANCELLED" or facts.folder.cancelled_json.exists():
        return Condition(facts, "cancelled", source, note="the job was cancelled")
    if job.state == "COMPLETED":
        return Condition(facts, "lost", source, note="the job has ended, the run says nothing of it")
    reason = f" ({job.reason})" if job.reason else ""
    return Condition(facts, "failed", source, note=f"the job ended as {job.state}{reason}")


def _without_job(facts: Facts, trouble: str | None, now: int) -> Condition:
    """Judge where SLURM does not know the job, or cannot be asked."""
    if trouble is None:
        return _gone(facts, QUEUE, "SLURM does not know the job any more")
    if facts.state in WAITING:
        return Condition(facts, facts.state, FOLDER, is_guess=True)
    return _of_ranks(facts, now, "")


def _of_process(facts: Facts, now: int) -> Condition:
    """Judge a run that is no job by its process, or from another host by its heartbeats."""
    is_here = lives_here(facts.status)
    if is_here:
        return _alive(facts, PROCESS, now)
    if is_here is None:
        return _of_ranks(facts, now, f"on {facts.status.get('host', 'another host')}")
    return _gone(facts, PROCESS, f"its process {facts.status.get('pid')} has gone")


def _of_ranks(facts: Facts, now: int, note: str) -> Condition:
    """Judge by the heartbeats alone."""
    if facts.are_ranks_done and facts.state == "prepared":
        return Condition(facts, "finished", BEATS, is_guess=True, note=note)
    return replace(_alive(facts, BEATS, now, note), is_guess=True)


def _alive(facts: Facts, source: str, now: int, note: str = "") -> Condition:
    age_s = facts.age_s(now)
    if facts.is_stalled(now):
        where = f"no rank has moved for {age_s:.0f} s"
        where += f", the last in {facts.action}" if facts.action else ""
        return Condition(facts, "stalled", source, note=where, age_s=age_s)
    return Condition(facts, "running", source, note=note, age_s=age_s)


def _gone(facts: Facts, source: str, note: str) -> Condition:
    if facts.folder.cancelled_json.exists():
        return Condition(facts, "cancelled", source, note=note)
    return Condition(facts, "lost", source, note=note)

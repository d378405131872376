"""What SLURM says of jobs: squeue and sacct, one call for all of them, neither of which a site must have."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from jobs.slurm.command import hear

PENDING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
STARTING = ("CONFIGURING",)
RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "RESIZING", "STAGE_OUT", "STOPPED", "SUSPENDED")
ACTIVE = (*PENDING, *STARTING, *RUNNING)


@dataclass(frozen=True, slots=True)
class Job:
    """A job in SLURM's own words; `start_utc` of a pending one is SLURM's estimate, where it has one."""

    state: str
    reason: str = ""
    start_utc: datetime | None = None
    name: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in ACTIVE


@dataclass(frozen=True, slots=True)
class Answer:
    """The jobs that a command knows, by number; `trouble` says why there is no answer."""

    jobs: Mapping[str, Job] = field(default_factory=dict)
    trouble: str | None = None


def is_job_number(value: object) -> bool:
    """Return whether a value from a file is a job's number, and nothing that a command could take for an option."""
    return isinstance(value, str | int) and re.fullmatch(r"[0-9]{1,18}", str(value)) is not None


def ask_queue(job_ids: Iterable[str]) -> Answer:
    """Ask squeue once; it also tells of jobs that ended some minutes ago."""
    numbers = sorted({number for number in job_ids if is_job_number(number)}, key=int)
    if not numbers:
        return Answer()
    said = hear(["squeue", "--noheader", "--states=all", "--format=%i|%T|%S|%r|%j", f"--jobs={','.join(numbers)}"])
    if said.trouble is not None and "Invalid job id" not in said.trouble:
        return Answer(trouble=said.trouble)
    jobs = {}
    for number, state, start, reason, name in _rows(said.lines, 5):
        jobs[number] = Job(state, "" if reason == "None" else reason, _utc(start), name)
    return Answer(jobs)


def ask_accounting(job_ids: Iterable[str]) -> Answer:
    """Ask sacct once; of a job that SLURM started again it tells the last start."""
    numbers = sorted({number for number in job_ids if is_job_number(number)}, key=int)
    if not numbers:
        return Answer()
    said = hear(
        ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State,Reason,Start",
         f"--jobs={','.join(numbers)}"]
    )  # fmt: skip
    if said.trouble is not None:
        return Answer(trouble=said.trouble)
    jobs = {}
    for number, state, reason, start in _rows(said.lines, 4):
        jobs[number] = Job(state.split()[0], "" if reason == "None" else reason, _utc(start))
    return Answer(jobs)


def num_queued(partition: str | None = None, qos: str | None = None) -> int | None:
    """Return how many jobs this user has waiting or running, in a partition and a qos; None where SLURM cannot be asked."""
    chosen = [f"--{key}={value}" for key, value in (("partition", partition), ("qos", qos)) if value]
    said = hear(["squeue", "--noheader", "--format=%i", f"--user={os.getuid()}", *chosen])
    return None if said.trouble is not None else len(said.lines)


def cancel_jobs(job_ids: Sequence[str]) -> str | None:
    """Cancel jobs by one scancel; gives what it said when it refused any of them."""
    return hear(["scancel", *filter(is_job_number, job_ids)]).trouble


def _rows(lines: Iterable[str], num_fields: int) -> Iterable[list[str]]:
    """Split lines at the bars; the last field may hold some."""
    for line in lines:
        fields = [text.strip() for text in line.split("|", num_fields - 1)]
        if len(fields) == num_fields and is_job_number(fields[0]) and fields[1]:
            yield fields


def _utc(text: str) -> datetime | None:
    """Read SLURM's local time; None for its N/A and Unknown."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None

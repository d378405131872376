"""Describe a job of any batch system in SLURM's words, and find the files of a submission."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gems.errors import TryLaterError

PENDING = (
    "PENDING",
    "EXPEDITING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
STARTING = ("CONFIGURING",)
SUSPENDED = ("SUSPENDED", "STOPPED")
ACTIVE = (
    *PENDING,
    *STARTING,
    *SUSPENDED,
    "RUNNING",
    "COMPLETING",
    "SIGNALING",
    "RESIZING",
    "STAGE_OUT",
)
OVER = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "REVOKED",
    "TIMEOUT",
)


@dataclass(frozen=True, slots=True)
class Job:
    """A job as its batch system describes it, in SLURM's words; `source` is the command queried.

    `start_utc` of a pending job is an estimate. `restarts` counts how often the job was requeued.
    `script` is the path of its batch script, and `token` identifies its submission; they are empty
    if the system does not report them.
    """

    state: str
    source: str = "squeue"
    reason: str = ""
    start_utc: datetime | None = None
    name: str | None = None
    exit_code: str = ""
    nodes: str = ""
    end_utc: datetime | None = None
    elapsed: str = ""
    time_limit: str = ""
    max_rss_bytes: int | None = None
    step_states: tuple[str, ...] = ()
    restarts: int = 0
    is_preempted: bool = False
    job_id: str = ""
    script: str = ""
    token: str = ""
    queue: str = ""

    @property
    def is_active(self) -> bool:
        """Whether the job waits or runs; an unknown state counts as active."""
        return self.state not in OVER

    def describe(self) -> str:
        """Describe the known facts of the job in one line."""
        names = ("state", "exit_code", "reason", "nodes", "elapsed", "time_limit")
        known = ((name.replace("_", " "), getattr(self, name)) for name in names)
        return ", ".join(f"{name} {value}" for name, value in known if value)


@dataclass(frozen=True, slots=True)
class JobQuery:
    """The jobs that a command lists, by number, or the `error` if it did not answer."""

    jobs: Mapping[str, Job] = field(default_factory=dict)
    error: str | None = None


class JobId(NamedTuple):
    """The parts of a job's ID, such as 41_7@serial.

    They are the number in its cluster, the task of an array, and the cluster.
    """

    number: str
    task: str = ""
    cluster: str = ""

    @classmethod
    def parse(cls, job_id: str) -> JobId:
        """Split an ID into its parts; an ID of another batch system is taken as the number."""
        parts = re.fullmatch(r"([0-9]+)(?:_([0-9]+))?(?:@(.+))?", job_id)
        return cls(job_id) if parts is None else cls(*parts.groups(default=""))

    @property
    def local(self) -> str:
        """The ID inside its cluster."""
        return "_".join(filter(None, (self.number, self.task)))

    def __str__(self) -> str:
        return "@".join(filter(None, (self.local, self.cluster)))


class UnclearSubmissionError(TryLaterError):
    """It is unknown whether the batch system has accepted a job."""


def script_path(logs: Path, token: str) -> Path:
    """Return the batch script of a submission.

    The script's name identifies the submission's job in SLURM.
    """
    return logs / f".submission_file_{token}.sh"


def pickle_path(logs: Path, token: str) -> Path:
    """Return the pickled work of a submission, until its job has a number."""
    return logs / f".submitted_{token}.pkl"


def name_submission(logs: Path, token: str, job_id: str) -> None:
    """Rename the files of a submission after its job, which looks for these names.

    Files that already have their names keep them.
    """
    script = script_path(logs, token)
    job_id = JobId.parse(job_id).local  # the job itself does not know its cluster
    named = logs / f"{job_id}_submission.sh"
    # the logs of each run of an array have a pickle, but no script
    with contextlib.suppress(FileNotFoundError):
        pickle_path(logs, token).rename(logs / f"{job_id}_submitted.pkl")
    with contextlib.suppress(FileNotFoundError):
        if not (script.is_symlink() or named.exists()):
            script.rename(named)
            script.symlink_to(named)

"""The record of a run's jobs in its folder; no other module reads or writes its files.

`chain.json` has the jobs that continue the run one after the other, and `requeues.json` its starts
again. These are two files because they have two writers: the submitting process may still add jobs
to the chain when a job of it counts its own start. The present job or submission is in status.json.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gems.errors import ConfigError, DoesNotFitError
from gems.runs.folder import RunFolder
from gems.runs.owner import SUBMITTING, Owner, own_job_id
from gems.utils.atomic_io import read_json, write_json
from gems.utils.units import now_utc
from jobs.batch.job import JobId, ListedJob
from jobs.schedulers.scheduler import is_job_id

CHAIN_JSON = "chain.json"
REQUEUES_JSON = "requeues.json"
# Who starts a run again.
LAUNCHER = "launcher"
SLURM = "SLURM"
CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The jobs of a run.

    `status` is status.json. `chain` has the numbers of the jobs of a chain; it is empty if the run
    has a single job. `requeues` has a row for each start again, oldest first, with the keys utc,
    why, by, job_id and step.
    """

    folder: RunFolder
    status: Mapping[str, Any]
    chain: tuple[str, ...]
    requeues: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, folder: RunFolder) -> JobRecord:
        """Read the record; damaged files count as empty."""
        status: Mapping[str, Any] = {}
        with contextlib.suppress(ConfigError, OSError):
            status = folder.read_status()
        rows = _read_list(folder.path / REQUEUES_JSON, "requeues")
        requeues = tuple(row for row in rows if isinstance(row, dict))
        return cls(folder, status, tuple(read_chain(folder)), requeues)

    @property
    def system(self) -> str:
        """The batch system of the submission, with its clusters if they are not the default."""
        # earlier versions recorded submissions without a system
        return str(self.status.get("scheduler", "slurm"))

    @property
    def is_over(self) -> bool:
        """Whether a chain has nothing left to do.

        This is so if the run is finished or cancelled, or would fail again.
        """
        codes = (ConfigError.exit_code, DoesNotFitError.exit_code)
        has_ended = self.status.get("state") in ("finished", "cancelled")
        return has_ended or self.status.get("exit_code") in codes

    @property
    def next_job(self) -> str | None:
        """The job that continues this run after this process's job, or None."""
        own = own_job_id()
        following = self.chain[self.chain.index(own) + 1 :] if own in self.chain else ()
        return following[0] if following else None

    def is_submission_of(self, owner: Owner) -> bool:
        """Return whether this owner submits the run and has no job ID yet."""
        return (
            self.status.get("state") == SUBMITTING
            and self.status.get("token") == owner.token
            and not owner.is_released
        )

    def own_number(self, job: ListedJob) -> str:
        """Return the number of the run's own job; `job` is any task of its submission."""
        task = self.status.get("task")
        return str(JobId.parse(job.job_id)._replace(task="" if task is None else str(task)))

    def num_requeues(self, why: str) -> int:
        """Count the starts by the launcher for one cause."""
        return sum(row.get("why") == why and row.get("by") == LAUNCHER for row in self.requeues)

    def with_requeue(self, why: str, by: str, step: int | None) -> JobRecord:
        """Write one more start of the run, and return the record with it."""
        row = {"utc": now_utc(), "why": str(why), "by": by, "job_id": own_job_id(), "step": step}
        return self.with_requeues((*self.requeues, row))

    def with_requeues(self, rows: tuple[dict[str, Any], ...]) -> JobRecord:
        """Write the starts of the run, and return the record with them."""
        write_json(self.folder.path / REQUEUES_JSON, {"requeues": rows})
        return replace(self, requeues=rows)


def read_chain(folder: RunFolder) -> list[str]:
    """Read the chain alone."""
    return [
        str(job_id) for job_id in _read_list(folder.path / CHAIN_JSON, "jobs") if is_job_id(job_id)
    ]


def write_chain(folder: RunFolder, job_ids: list[str]) -> None:
    """Write the jobs of a chain that have been submitted so far."""
    write_json(folder.path / CHAIN_JSON, {"jobs": job_ids})


def _read_list(path: Path, key: str) -> list[Any]:
    with contextlib.suppress(OSError, ValueError):
        rows = read_json(path).get(key)
        return rows if isinstance(rows, list) else []
    return []

"""Messages of slurmstepd and srun about the end of jobs, steps and nodes, as they stand in logs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from gems.runs.failure_cause import FailureCause

REQUEUED = "requeued"  # by `scontrol requeue`: no failure
CANCELLED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) (?P<job>\d+)?\S* .*?CANCELLED AT (?P<time>\S+)(?: DUE TO (?P<why>[A-Z ]+))?"
)
NODE_FAILURE = re.compile(r"[Nn]ode failure on (?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)")
REASONS: tuple[tuple[str, str], ...] = (
    ("PREEMPTION", FailureCause.PREEMPTED), ("TIME LIMIT", FailureCause.TIME_LIMIT),
    ("NODE FAILURE", FailureCause.NODE),
    ("JOB REQUEUE", REQUEUED),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The end of a job or of a step by SLURM; `reason` is the text after DUE TO, empty if a user cancelled it."""

    is_job: bool
    job_id: str | None
    reason: str
    time_ns: int | None

    @property
    def cause(self) -> str:
        """The cause: a FailureCause if the reason is a known one, REQUEUED, or the reason in lower case."""
        if not self.reason:
            return FailureCause.CANCELLED
        return next((cause for text, cause in REASONS if self.reason.startswith(text)), self.reason.lower())


def parse_cancellation(line: str) -> Cancellation | None:
    """Parse `*** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO TIME LIMIT ***`.

    Times are the node's local ones.
    """
    found = CANCELLED.search(line)
    if found is None:
        return None
    time_ns = None
    with contextlib.suppress(ValueError):
        time_ns = int(datetime.fromisoformat(found["time"]).timestamp() * 1e9)
    return Cancellation(found["what"] == "JOB", found["job"], (found["why"] or "").strip(), time_ns)


def failed_node(lines: Iterable[str]) -> str | None:
    """Return the first node that srun reports as failed."""
    return next((found["node"] for line in lines if (found := NODE_FAILURE.search(line))), None)

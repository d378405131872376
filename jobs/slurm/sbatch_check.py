"""What sbatch answers: whether it would take a script (`sbatch --test-only`), and how its refusals are reported."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from datetime import datetime

from gems.errors import ConfigError
from jobs.slurm.command import SlurmRefusedError, run_slurm

TEST_LIMIT_S = 60.0
ESTIMATE = re.compile(
    r"Job \d+ to start at (?P<start>\S+)(?: using (?P<cpus>\d+) processors)?(?: on nodes (?P<nodes>\S+))?"
)
# All of SLURM's names of limits on the number of jobs have this in common, as QOSMaxSubmitJobPerUserLimit and
# AssocGrpSubmitJobsLimit have. The policy is named for limits of size and time too, whose names sbatch prints before.
QUEUE_FULL = re.compile(r"SubmitJob|temporarily unable to accept job")
POLICY, NAMED_LIMIT = "Job violates accounting/QOS policy", re.compile(r"\b(?:QOS|Assoc|Partition)[A-Z]\w*")


class TryLaterError(ConfigError):
    """A submission that would be taken once jobs have ended: the queue is full, or the run folder is in use."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """When and where SLURM would start a job if it were submitted now, by its local clock."""

    start: datetime | None
    nodes: str | None

    def describe(self, now: datetime) -> str:
        """Describe the estimate in one line."""
        if self.start is None:
            return "sbatch accepts it, and estimates no start"
        wait_min = max(0.0, (self.start - now).total_seconds() / 60)
        when = "at once" if wait_min < 1 else f"in about {_span(wait_min)} ({self.start.isoformat(' ', 'minutes')})"
        return f"sbatch accepts it, to start {when}" + (f" on {self.nodes}" if self.nodes else "")


def check_script(cluster: str, script: str) -> Estimate:
    """Return when SLURM would start a script; nothing is queued.

    Raises:
        ConfigError: sbatch refuses it.
        SlurmUnavailableError: sbatch is missing, or reaches no SLURM.
    """
    try:
        return parse_estimate(run_slurm(["sbatch", "--test-only"], script, TEST_LIMIT_S).check())
    except SlurmRefusedError as error:
        raise refusal(cluster, error.reason) from error


def parse_estimate(text: str) -> Estimate:
    """Parse `Job 7 to start at 2026-11-21T22:00:00 using 2 processors on nodes n[1-2] in partition debug`."""
    found = ESTIMATE.search(text)
    start = None
    with contextlib.suppress(ValueError):
        start = datetime.fromisoformat(found["start"]) if found else None
    return Estimate(start, found["nodes"] if found else None)


def refusal(cluster: str, reason: str, what: str = "job") -> ConfigError:
    """Return the error for a job that sbatch refuses; a TryLaterError if the queue is full."""
    is_full = QUEUE_FULL.search(reason) or (POLICY in reason and NAMED_LIMIT.search(reason) is None)
    plain = re.sub(r"(sbatch: )?(error: |fatal: )|allocation failure: ", "", reason)
    return (TryLaterError if is_full else ConfigError)(
        "cluster", cluster, f"sbatch refuses the {what}: {plain}",
        "see cluster.partition, cluster.account, cluster.minutes and cluster.sbatch",
    )  # fmt: skip


def _span(minutes: float) -> str:
    hours = minutes / 60
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"

"""sbatch's own word on a job before it is submitted: `sbatch --test-only` of the very script."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from gems.errors import ConfigError
from jobs.slurm.command import RefusedError, ask

TEST_LIMIT_S = 60.0
SEEN = re.compile(
    r"Job \d+ to start at (?P<start>\S+)(?: using (?P<cpus>\d+) processors)?(?: on nodes (?P<nodes>\S+))?"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """When and where SLURM would start a job were it submitted now, by its local clock."""

    start: datetime | None
    nodes: str | None

    def words(self, now: datetime) -> str:
        """Report it in one line."""
        if self.start is None:
            return "sbatch takes it, and says no start"
        wait_min = max(0.0, (self.start - now).total_seconds() / 60)
        when = "at once" if wait_min < 1 else f"in about {_span(wait_min)} ({self.start.isoformat(' ', 'minutes')})"
        return f"sbatch takes it, to start {when}" + (f" on {self.nodes}" if self.nodes else "")


def try_script(cluster: str, script: str) -> Estimate:
    """Ask sbatch whether it would take a script; nothing is queued.

    Raises:
        ConfigError: it would not.
        UnansweredError: sbatch is not there, or reaches no SLURM.
    """
    try:
        said = ask(["sbatch", "--test-only"], script, TEST_LIMIT_S)
    except RefusedError as error:
        raise ConfigError(
            "cluster", cluster, f"sbatch refuses the job: {_plain(str(error))}",
            "see cluster.partition, cluster.account, cluster.minutes and cluster.sbatch",
        ) from error  # fmt: skip
    return read_estimate(said)


def read_estimate(said: str) -> Estimate:
    """Read sbatch's line: Job 7 to start at 2026-11-21T22:00:00 using 2 processors on nodes n[1-2] in partition debug."""
    found = SEEN.search(said)
    if found is None:
        return Estimate(None, None)
    try:
        start = datetime.fromisoformat(found["start"])
    except ValueError:
        start = None
    return Estimate(start, found["nodes"])


def _plain(said: str) -> str:
    """Return the reason without sbatch's own name before it."""
    return re.sub(r"(sbatch: )?(error: |fatal: )|allocation failure: ", "", said)


def _span(minutes: float) -> str:
    hours = minutes / 60
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"

"""The cost of jobs, and the question before expensive ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gems.errors import ConfigError
from jobs.batch.resources import JobSpec

DRY_RUN = "--dry-run"
YES = "--yes"
FORCE = "--force"
KEY = "cluster.confirm_above_gpu_hours"


def describe_cost(jobs: Sequence[JobSpec]) -> str:
    """Describe the GPU-hours of jobs that take all their minutes.

    The site's charge is added if its rate is known.
    """
    hours = sum(job.gpu_hours for job in jobs)
    charges: dict[str, float] = {}
    for job in jobs:
        if job.charge is not None:
            unit = job.charge_unit or job.cluster.charge_per or ""
            charges[unit] = charges.get(unit, 0.0) + job.charge
    charge = "".join(f", charge {amount:g} {unit}".rstrip() for unit, amount in charges.items())
    what = (
        f"{jobs[0].gpus} GPUs for {jobs[0].minutes} min" if len(jobs) == 1 else f"{len(jobs)} jobs"
    )
    return f"{hours:g} GPU-hours ({what}{charge})"


def is_confirmed(jobs: Sequence[JobSpec], *, assume_yes: bool) -> bool:
    """Ask before jobs of more GPU-hours together than the lowest limit of one.

    Raise ConfigError without a terminal.
    """
    limits = [job.cluster.confirm_above_gpu_hours for job in jobs]
    limit = min((limit for limit in limits if limit is not None), default=None)
    hours = sum(job.gpu_hours for job in jobs if job.is_batch)
    if limit is None or hours <= limit or assume_yes:
        return True
    if not sys.stdin.isatty():
        text = f"{describe_cost(jobs)} must be confirmed, and stdin is no terminal"
        raise ConfigError(KEY, f"{limit:g}", text, f"add {YES}")
    return ask_yes(f"{describe_cost(jobs)}, above {KEY}={limit:g}: submit?")


def ask_yes(question: str) -> bool:
    """Ask a question on stderr and return whether the answer is yes."""
    print(f"jobs: {question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")

"""What jobs cost, and the question that goes before expensive ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gems.cli.framework import Options
from gems.errors import ConfigError
from jobs.slurm.resources import JobSpec

YES = "--yes"
KEY = "cluster.confirm_above_gpu_hours"


def cost_words(jobs: Sequence[JobSpec]) -> str:
    """Return the GPU-hours of jobs when they take all their minutes, and with a known rate what the site takes for them."""
    hours = sum(job.gpu_hours for job in jobs)
    charges: dict[str, float] = {}
    for job in jobs:
        if job.charge is not None:
            unit = job.charge_unit or job.charge_per or ""
            charges[unit] = charges.get(unit, 0.0) + job.charge
    charge = "".join(f", charge {amount:g} {unit}".rstrip() for unit, amount in charges.items())
    if len(jobs) == 1:
        (job,) = jobs
        return f"{hours:g} GPU-hours ({job.gpus} GPUs for {job.minutes} min{charge})"
    return f"{hours:g} GPU-hours ({len(jobs)} jobs{charge})"


def is_agreed(jobs: Sequence[JobSpec], limit: float | None, options: Options) -> bool:
    """Ask on the terminal before jobs of more than `limit` GPU-hours together; None never asks, --yes answers.

    Raises:
        ConfigError: nobody is there to ask.
    """
    hours = sum(job.gpu_hours for job in jobs if job.is_batch)
    if limit is None or hours <= limit or YES in options.flags:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(
            KEY, f"{limit:g}", f"{cost_words(jobs)} must be confirmed, and nobody is there to ask", f"add {YES}"
        )
    print(f"jobs: {cost_words(jobs)}, above {KEY}={limit:g}: submit? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")

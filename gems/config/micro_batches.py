"""The number of micro-batches of a step: parallel.micro_batches, replications and parts."""

from __future__ import annotations

from dataclasses import replace

from gems.config.schema import ParallelConfig
from gems.errors import ConfigError
from gems.schedule import FAMILIES


def resolve_micro_batches(parallel: ParallelConfig, schedule: str) -> ParallelConfig:
    """Derive replications, parts and micro-batches, which are their product.

    GEMS has 2 replications or more.
    """
    family = FAMILIES.get(schedule)
    is_gems = family is not None and family.has_runs
    total = parallel.micro_batches
    runs = parallel.replications
    parts = parallel.parts
    if schedule == "gems_mast":
        if runs not in (None, 2):
            raise ConfigError(
                "parallel.replications",
                runs,
                "must be 2 for gems_mast",
                "use schedule=gems_master for more",
            )
        runs = 2
    if total is not None:
        if is_gems and total % 2:
            raise ConfigError(
                "parallel.micro_batches",
                total,
                f"must be even for {schedule}: half run in each direction",
                f"use {total - 1} or {total + 1}" if total > 1 else "use 2",
            )
        if runs is None:
            parts = parts or 1
            runs = total // parts
        elif parts is None:
            parts = total // runs
        if runs * parts != total:
            raise ConfigError(
                "parallel.micro_batches",
                total,
                f"must be replications x parts = {runs} x {parts}",
                "give two of the three, or numbers that agree",
            )
    else:
        runs = runs or (2 if is_gems else 1)
        parts = parts or (1 if is_gems else max(2, 2 * parallel.partitions))
        total = runs * parts
    if is_gems and runs % 2:
        raise ConfigError(
            "parallel.replications",
            runs,
            f"must be even for {schedule}: the two directions take turns",
            f"use {runs + 1}, or change parallel.micro_batches or parallel.parts",
        )
    return replace(parallel, micro_batches=total, replications=runs, parts=parts)

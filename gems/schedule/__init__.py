"""Schedules: which rank does what, in which order. Pure: no torch, no MPI, no Hydra."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gems.schedule.gems_master import gems_mast, gems_master
from gems.schedule.gpipe import gpipe
from gems.schedule.layer_parallel import layer_parallel
from gems.schedule.one_f_one_b import one_f_one_b
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Family:
    """A named schedule: `build(num_ranks, num_micro_batches, num_parts)` and how many directions it runs."""

    build: Callable[[int, int, int], Schedule]
    num_directions: int = 1


FAMILIES: dict[str, Family] = {
    "layer_parallel": Family(lambda p, n, m: layer_parallel(p, n)),
    "gpipe": Family(lambda p, n, m: gpipe(p, n)),
    "1f1b": Family(lambda p, n, m: one_f_one_b(p, n)),
    "gems_mast": Family(lambda p, n, m: gems_mast(p, m), num_directions=2),
    "gems_master": Family(lambda p, n, m: gems_master(p, n // m, m), num_directions=2),
}


def generate(name: str, num_ranks: int, num_micro_batches: int, num_parts: int = 1) -> Schedule:
    """Builds the compute-only schedule of a family in `FAMILIES`; the counts are checked by `gems.resolve`."""
    return FAMILIES[name].build(num_ranks, num_micro_batches, num_parts)

"""GEMS: two copies of the pipeline in opposite directions over the same ranks, in turn."""

from __future__ import annotations

from gems.schedule.action import Action, backward, forward
from gems.schedule.placement import bidirectional
from gems.schedule.schedule import Schedule


def gems_master(num_ranks: int, num_replications: int, num_parts: int) -> Schedule:
    """Build GEMS-MASTER (Jain et al. 2020): `num_replications` (even) runs, direction 0 and 1 in turn.

    Each run is a block of `num_parts` micro-batches, all forwards and then all backwards. No rank waits on
    purpose: a rank that has freed the activations of one run starts the next, so runs chase each other over the
    ranks. Holds `num_parts` micro-batches of activations on every rank, whatever the number of runs; with one
    part it takes P f + N P b + (N - 1) f time (b >= f).
    """
    placement = bidirectional(num_ranks)
    rows = tuple(
        tuple(
            action
            for run in range(num_replications)
            for action in _run(placement.ranks[run % 2].index(rank), run, num_parts)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gems_master", num_replications * num_parts, placement, rows)


def gems_mast(num_ranks: int, num_parts: int) -> Schedule:
    """Build GEMS-MAST (Jain et al. 2020): one run down and one run up, that is MASTER with two runs."""
    master = gems_master(num_ranks, 2, num_parts)
    return Schedule("gems_mast", master.num_micro_batches, master.placement, master.rows)


def _run(stage: int, run: int, num_parts: int) -> tuple[Action, ...]:
    micro_batches = range(run * num_parts, (run + 1) * num_parts)
    direction = run % 2
    return tuple(make(stage, m, direction) for make in (forward, backward) for m in micro_batches)

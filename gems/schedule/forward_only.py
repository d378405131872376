"""Forward only: evaluation as a schedule like any other."""

from __future__ import annotations

from gems.schedule.action import Action, forward
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule


def forward_only(placement: Placement, num_micro_batches: int) -> Schedule:
    """Builds the schedule that sends every micro-batch down through the stages and frees it behind.

    One direction is enough: the copies of a stage hold equal weights, and two streams in one list of a rank would
    wait for each other at every turn.
    """
    rows: list[tuple[Action, ...]] = [()] * placement.num_ranks
    for stage in range(placement.num_stages):
        rows[placement.rank_of(0, stage)] += tuple(forward(stage, m) for m in range(num_micro_batches))
    return Schedule("forward_only", num_micro_batches, placement, tuple(rows), forward_only=True)

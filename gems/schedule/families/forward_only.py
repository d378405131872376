"""Forward only: evaluation as a schedule like any other."""

from __future__ import annotations

from gems.schedule.action import forward
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule


def forward_only(placement: Placement, num_micro_batches: int) -> Schedule:
    """Build the schedule that sends every micro-batch down through the stages and frees it behind.

    One direction is enough: the copies of a stage hold equal weights, and two streams in one list of a rank would
    wait for each other at every turn. A rank with several stages takes them along the diagonal, so that it holds few
    boundaries at once.
    """
    rows = tuple(
        tuple(
            forward(stage, m)
            for _, stage, m in sorted(
                (m + stage, stage, m)
                for direction, stage in placement.stages_on(rank)
                if direction == 0
                for m in range(num_micro_batches)
            )
        )
        for rank in range(placement.num_ranks)
    )
    return Schedule("forward_only", num_micro_batches, placement, rows, forward_only=True)

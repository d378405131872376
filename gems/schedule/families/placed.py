"""Placed: the operators of one model on the ranks that a placer gave them, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Sequence

from gems.schedule.action import backward, forward
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule


def placed(
    placement: Placement, num_micro_batches: int, forward_order: Sequence[int], backward_order: Sequence[int]
) -> Schedule:
    """Build the schedule that runs the stages of a graph in the order of a placement in time.

    A rank runs forward of its stages in the order given, then their backward, then the next micro-batch: it may begin
    that one while others are still at this one (Pal et al. 2019 place one micro-batch).
    """
    rows = tuple(
        tuple(
            action
            for m in range(num_micro_batches)
            for action in (
                *(forward(stage, m) for stage in forward_order if placement.rank_of(0, stage) == rank),
                *(backward(stage, m) for stage in backward_order if placement.rank_of(0, stage) == rank),
            )
        )
        for rank in range(placement.num_ranks)
    )
    return Schedule("placed", num_micro_batches, placement, rows)

"""Schedules for a given placement, which are not values of `schedule=`.

They are used for evaluation, and for the stages of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from gems.schedule.action import backward, forward
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule


def forward_only(placement: Placement, num_whole: int, num_strips: int = 1) -> Schedule:
    """Build the schedule for evaluation: every micro-batch passes the stages and is freed at once.

    If `num_strips` is above 1, these are the strips of `num_whole` micro-batches. One direction is
    sufficient: the copies of a stage have equal weights, and two streams in one rank's list would
    wait for each other at every turn. A rank with several stages runs them along the diagonal, so
    that it holds few boundary tensors at once.
    """
    rank_schedules = []
    num = num_whole * num_strips
    for rank in range(placement.num_ranks):
        stages = [stage for direction, stage in placement.stages_on(rank) if direction == 0]
        cells = sorted((m + stage, stage, m) for stage in stages for m in range(num))
        rank_schedules.append(tuple(forward(stage, m) for _, stage, m in cells))
    return Schedule(
        "forward_only",
        num,
        placement,
        tuple(rank_schedules),
        forward_only=True,
        num_strips=num_strips,
    )


def placed(
    placement: Placement,
    num_micro_batches: int,
    forward_order: Sequence[int],
    backward_order: Sequence[int],
) -> Schedule:
    """Build the schedule that runs the stages of a graph in the order of a placement in time.

    A rank runs the forward of its stages in the given order, then their backward, then the next
    micro-batch. It may begin that one while other ranks are still at this one (Pal et al. 2019
    place one micro-batch).
    """
    both = [(forward, stage) for stage in forward_order] + [
        (backward, stage) for stage in backward_order
    ]
    by_rank = (
        [item for item in both if placement.rank_of(0, item[1]) == rank]
        for rank in range(placement.num_ranks)
    )
    rank_schedules = tuple(
        tuple(make(stage, m) for m in range(num_micro_batches) for make, stage in items)
        for items in by_rank
    )
    return Schedule("placed", num_micro_batches, placement, rank_schedules)

"""Rows from times: the way from a paper's figure to each rank's list."""

from __future__ import annotations

from collections.abc import Iterable

from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule


def in_order_of_time(
    name: str, num_micro_batches: int, placement: Placement, timed: Iterable[tuple[float, Action]]
) -> Schedule:
    """Build the schedule that runs each rank's actions in the order of their times in the paper's figure.

    Args:
        name: of the family.
        num_micro_batches: of a step, over both directions.
        placement: says on which rank a stage lies.
        timed: every compute action with its time. An action's time is later than those that it needs, so no order
            can make ranks wait in a circle. Of two actions at one time a backward goes first, because it frees
            memory, and then direction 0.
    """
    rows: list[list[tuple[float, bool, int, Action]]] = [[] for _ in range(placement.num_ranks)]
    for time, action in timed:
        rank = placement.rank_of(action.direction, action.stage)
        rows[rank].append((time, action.kind is Kind.F, action.direction, action))
    return Schedule(
        name, num_micro_batches, placement,
        tuple(tuple(action for *_, action in sorted(row)) for row in rows),
    )  # fmt: skip

"""What several families share: rows from the times of a paper's figure, and an even number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

from gems.errors import ConfigError
from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule


def in_order_of_time(
    name: str, num_micro_batches: int, placement: Placement, timed: Iterable[tuple[float, Action]]
) -> Schedule:
    """Build the schedule that runs each rank's actions in the order of their times in the paper's figure.

    An action's time must be later than those of the actions that it needs, so that no order can make ranks wait in a
    circle. Of two actions at one time a backward goes first, because it frees memory, and then direction 0.
    """
    rows: list[list[tuple[float, bool, int, Action]]] = [[] for _ in range(placement.num_ranks)]
    for time, action in timed:
        rank = placement.rank_of(action.direction, action.stage)
        rows[rank].append((time, action.kind is Kind.F, action.direction, action))
    ordered = tuple(tuple(action for *_, action in sorted(row)) for row in rows)
    return Schedule(name, num_micro_batches, placement, ordered)


def refuse_odd(name: str, num_micro_batches: int, why: str) -> None:
    """Check that the micro-batches of family `name` can be halved.

    Raises:
        ConfigError: an odd number of them; `why` describes what the two directions do.
    """
    if num_micro_batches % 2:
        raise ConfigError(
            "parallel.micro_batches", num_micro_batches, f"must be even for {name}: {why}",
            f"use {num_micro_batches + 1}",
        )  # fmt: skip

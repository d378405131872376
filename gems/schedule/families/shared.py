"""Helpers that several families share.

They build rank schedules from the times in a paper's figure or from letters, and check counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import product

from gems.errors import ConfigError
from gems.schedule.action import Action, Kind, backward, forward, input_gradient, weight_gradient
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule


def in_order_of_time(
    name: str, num_micro_batches: int, placement: Placement, timed: Iterable[tuple[float, Action]]
) -> Schedule:
    """Build the schedule that runs each rank's actions in the order of their times in a figure.

    The time of an action must be later than the times of its dependencies, so that the order cannot
    make ranks wait in a circle. Of two actions at the same time, a backward goes first, because it
    frees memory, and then direction 0.
    """
    rank_schedules: list[list[tuple[float, bool, int, Action]]] = [
        [] for _ in range(placement.num_ranks)
    ]
    for time, action in timed:
        rank = placement.rank_of(action.direction, action.stage)
        rank_schedules[rank].append((time, action.kind is Kind.F, action.direction, action))
    ordered = tuple(tuple(action for *_, action in sorted(timed)) for timed in rank_schedules)
    return Schedule(name, num_micro_batches, placement, ordered)


def refuse_odd(name: str, num_micro_batches: int, why: str) -> None:
    """Check that the micro-batches of family `name` can be divided by two.

    Raises:
        ConfigError: Their number is odd; `why` describes the use of the two directions.
    """
    if num_micro_batches % 2:
        raise ConfigError(
            "parallel.micro_batches",
            num_micro_batches,
            f"must be even for {name}: {why}",
            f"use {num_micro_batches + 1}",
        )


def from_letters(
    letters: str, rank: int, num_ranks: int, num_micro_batches: int
) -> tuple[Action, ...]:
    """Return a rank's actions for a string of letters.

    The letters are f b i for the chunk on the way down, F B I for the one on the way up, and w for
    either. Micro-batches past the last are left out; b and i count together, and w is the oldest
    weight gradient that is due.
    """
    make = {"f": forward, "b": backward, "i": input_gradient}
    next_of = dict.fromkeys(product((False, True), repeat=2), 0)
    owed: deque[Action] = deque()
    actions = []
    for letter in letters:
        if letter == "w":
            actions.append(owed.popleft())
            continue
        kind = letter.lower()
        is_up = letter.isupper()
        m = next_of[kind == "f", is_up]
        if m < num_micro_batches:
            next_of[kind == "f", is_up] += 1
            stage = 2 * num_ranks - 1 - rank if is_up else rank
            actions.append(make[kind](stage, m))
            if kind == "i":
                owed.append(weight_gradient(stage, m))
    return tuple(actions)

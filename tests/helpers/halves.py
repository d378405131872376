"""Schedules whose backward is split, made of those whose backward is whole."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule


def halved(schedule: Schedule, delay: int | None = 0) -> Schedule:
    """Put I in the place of each B of a compute-only schedule, and its W `delay` backwards later.

    None is at the end.
    """
    return replace(
        schedule, rank_schedules=tuple(_row(row, delay) for row in schedule.rank_schedules)
    )


def _row(row: tuple[Action, ...], delay: int | None) -> tuple[Action, ...]:
    made: list[Action] = []
    waiting: deque[Action] = deque()
    for action in row:
        if action.kind is not Kind.B:
            made.append(action)
            continue
        made.append(action._replace(kind=Kind.I))
        waiting.append(action._replace(kind=Kind.W))
        while delay is not None and len(waiting) > delay:
            made.append(waiting.popleft())
    return (*made, *waiting)

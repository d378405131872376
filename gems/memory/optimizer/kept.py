"""What the walk of kept layers tells the plan's programme, and what of it does not hold under every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gems.memory.walk import Point
from gems.schedule.action import COMPUTE_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.schedule import Schedule

BACKWARD = (Kind.B, Kind.I)


def with_whole_backward(schedule: Schedule) -> Schedule:
    """Return a schedule without the split of the backward: what is kept from I to W depends on segments, and is not counted."""
    if all(action.kind is not Kind.W for row in schedule.rows for action in row):
        return schedule
    rows = tuple(
        tuple(
            action._replace(kind=Kind.B) if action.kind is Kind.I else action
            for action in row
            if action.kind is not Kind.W
        )
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def spared_messages(points: Sequence[Point]) -> dict[Action, int]:
    """Return for each action the bytes of messages that would not be there if a segment were run again before a backward.

    Then a receive of that backward is posted an action later, and what was sent before it is gone by then.
    """
    found: dict[Action, int] = {}
    sent = before = 0
    received: list[tuple[int, int | None, int, int]] = []
    for point in points:
        action, more = point.action, point.device_bytes - before
        before = point.device_bytes
        if action.kind in SEND_KINDS:
            sent += more
        elif action.kind is Kind.RECV_B:
            received.append((action.stage, action.micro_batch, action.direction, more))
        elif action.kind in COMPUTE_KINDS:
            is_backward = action.kind in BACKWARD
            others = [
                size for *place, size in received
                if not is_backward or tuple(place) != (action.stage, action.micro_batch, action.direction)
            ]  # fmt: skip
            found[action] = sum(others) + (sent if is_backward else 0)
            sent, received = 0, []
    return found

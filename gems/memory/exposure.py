"""Exposure: how much of its copies and second runs a step waits for, segment by segment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gems.memory.case import Outcome
from gems.schedule.action import COMPUTE_KINDS, WAIT_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies

Place = tuple[int, int]  # (stage, segment)


@dataclass(frozen=True, slots=True)
class Exposure:
    """What one segment costs in a step, over all its micro-batches and directions, in seconds.

    `copy_s` is the time of its copies both ways, `exposed_s` what ranks wait for them, `again_s` that of its second runs.
    `out_s` and `back_s` are when the copy out of its first micro-batch begins and its copy back ends, `moved_bytes` what
    its copies out carry; None where nothing is copied.
    """

    copy_s: float = 0.0
    exposed_s: float = 0.0
    again_s: float = 0.0
    moved_bytes: int = 0
    out_s: float | None = None
    back_s: float | None = None


def exposures(outcome: Outcome) -> dict[Place, Exposure]:
    """Return what each segment of a plan costs in the simulated step."""
    found: dict[Place, Exposure] = {}
    for rank, row in enumerate(outcome.schedule.rows):
        starts, ends = outcome.played.start[rank], outcome.played.end[rank]
        moved = {point.action: point.moved_bytes for point in outcome.ranks[rank].points}
        arrival: dict[Action, float] = {}
        free = 0.0
        for action, start, end in zip(row, starts, ends, strict=True):
            kind, place = action.kind, (action.stage, action.segment)
            if action.segment is None:
                free = max(free, end) if kind in COMPUTE_KINDS else free
                continue
            one = found.get(place, Exposure())  # type: ignore[arg-type]
            if kind is Kind.OFFLOAD:
                out_s = start if one.out_s is None else one.out_s
                one = replace(
                    one, copy_s=one.copy_s + end - start, out_s=out_s, moved_bytes=one.moved_bytes + moved[action]
                )
            elif kind is Kind.PREFETCH:
                arrival[action] = end
                one = replace(one, copy_s=one.copy_s + end - start, back_s=end if one.back_s is None else one.back_s)
            elif kind in COMPUTE_KINDS or kind in WAIT_KINDS:
                waited = _waited(action, free, start, outcome, arrival)
                again = end - start if kind is Kind.R else 0.0
                one = replace(one, exposed_s=one.exposed_s + waited, again_s=one.again_s + again)
                free = end
            found[place] = one  # type: ignore[index]
    return found


def _waited(action: Action, free: float, start: float, outcome: Outcome, arrival: dict[Action, float]) -> float:
    """Return how long a rank stood still for a copy before an action, from `free` on."""
    if action.kind is Kind.FREE:
        return max(0.0, start - free)
    copies = [arrival[need] for need in dependencies(action, outcome.schedule) if need in arrival]
    return max(0.0, min(start, max(copies)) - free) if copies else 0.0

"""Windows cut to what their copies used: the same time, and no byte is held for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from gems.memory.case import Outcome
from gems.memory.optimizer.lanes import is_compute
from gems.memory.optimizer.windows import Widths, set_distances
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.schedule.action import Action, Kind

BACKWARD = (Kind.B, Kind.I)


def trimmed(outcome: Outcome, limit_bytes: int, play: Callable[[MemoryPlan], Outcome]) -> Outcome:
    """Cut the windows of a played plan to what their copies used: the same time, and no byte is held for nothing.

    What no copy ever takes is kept, and said to be.
    """
    outcome = _if_as_good(outcome, play(_without_idle(outcome)), limit_bytes)
    ordered = _if_as_good(outcome, play(set_distances(outcome.plan, None, _in_order(outcome))), limit_bytes)
    free, ahead = _used(ordered)
    for widths in ((free, ahead), (free, None), (None, ahead)):
        found = _if_as_good(ordered, play(set_distances(ordered.plan, *widths)), limit_bytes)
        if found is not ordered:
            return found
    return ordered


def _if_as_good(outcome: Outcome, other: Outcome, limit_bytes: int) -> Outcome:
    fits = max(other.peak_bytes) <= max(limit_bytes, *outcome.peak_bytes)
    return other if fits and other.step_s <= outcome.step_s * (1 + 1e-9) else outcome


def _without_idle(outcome: Outcome) -> MemoryPlan:
    """Return the plan without the offloaded segments whose windows meet, so that nothing leaves."""
    moved = {
        (action.stage, action.segment) for row in outcome.schedule.rows for action in row if action.kind is Kind.OFFLOAD
    }
    stages = tuple(
        tuple(
            Segment(segment.first, segment.end)
            if segment.choice is Choice.OFFLOAD and (stage, index) not in moved
            else segment
            for index, segment in enumerate(segments)
        )
        for stage, segments in enumerate(outcome.plan.stages)
    )
    return replace(outcome.plan, stages=stages)


def _in_order(outcome: Outcome) -> Widths:
    """Return windows in which no copy back is posted before one that is needed sooner, and so carries what that one would."""
    ahead: Widths = {}
    for row in outcome.schedule.rows:
        place_of = _places(row)
        latest = 0
        for needed, action in sorted(
            (_needed(action, place_of), action)
            for action in row
            if action.kind is Kind.PREFETCH and action.segment is not None
        ):
            assert action.segment is not None
            place = (action.stage, action.segment)
            latest = max(latest, needed - outcome.plan.stages[place[0]][place[1]].ahead)
            ahead[place] = max(ahead.get(place, 0), needed - latest)
    return ahead


def _places(row: Sequence[Action]) -> dict[Action, int]:
    """Return the place of each compute action among those of a rank."""
    return {action: place for place, action in enumerate(filter(is_compute, row))}


def _used(outcome: Outcome) -> tuple[Widths, Widths]:
    """Return what the played copies used of their windows, out and back.

    A copy out is waited for where it has ended by then anyway, a copy back posted at the last action from which it and
    those behind it still come in time.
    """
    free: Widths = {}
    ahead: Widths = {}
    for rank, row in enumerate(outcome.schedule.rows):
        start, end = outcome.played.start[rank], outcome.played.end[rank]
        place_of = _places(row)
        compute = [index for index, action in enumerate(row) if action in place_of]
        latest: list[tuple[int, float, Action]] = []
        for index, action in enumerate(row):
            if action.segment is not None and action.kind is Kind.OFFLOAD:
                place = (action.stage, action.segment)
                made = place_of[action._replace(kind=Kind.F)]
                width = outcome.plan.stages[place[0]][place[1]].free_after
                used = next((w for w in range(width) if end[compute[made + w]] >= end[index]), width)
                free[place] = max(free.get(place, 0), used)
            elif action.segment is not None and action.kind is Kind.PREFETCH:
                latest.append((_needed(action, place_of), end[index] - start[index], action))
        before = math.inf
        for needed, copy_s, action in sorted(latest, reverse=True):
            assert action.segment is not None
            place = (action.stage, action.segment)
            width = outcome.plan.stages[place[0]][place[1]].ahead
            before = min(before, start[compute[needed]]) - copy_s
            used = next((w for w in range(width) if start[compute[needed - w]] <= before), width)
            ahead[place] = max(ahead.get(place, 0), used)
    return free, ahead


def _needed(action: Action, place_of: dict[Action, int]) -> int:
    for kind in BACKWARD:
        found = place_of.get(action._replace(kind=kind))
        if found is not None:
            return found
    raise KeyError(action)

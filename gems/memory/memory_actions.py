"""Memory actions: the pass that puts a memory plan into a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

PASS = "add_memory"
_BACKWARD = (Kind.B, Kind.I)


def add_memory(schedule: Schedule, plan: MemoryPlan) -> Schedule:
    """Split the compute actions of a compute-only schedule into segments, and add the plan's memory actions.

    An offloaded segment gets OFFLOAD after its forward, FREE and PREFETCH at the plan's distances, and AWAIT where the
    plan says so; one that is recomputed gets R before its backward. Copies that are posted at one place come back in
    the order in which they are needed. Where a copy would have to come back before it has left, the segment is kept for
    that micro-batch: so are the last ones before the turn.
    """
    rows = tuple(tuple(_Row(row, plan).lines()) for row in schedule.rows)
    return replace(schedule, rows=rows, passes=(*schedule.passes, PASS))


class _Row:
    """A rank's schedule in segments, and the actions before and after each."""

    def __init__(self, row: tuple[Action, ...], plan: MemoryPlan) -> None:
        self.plan = plan
        self.compute = [part for action in row for part in _parts(action, plan.stages[action.stage])]
        self.place = {action: index for index, action in enumerate(self.compute)}
        self.back: dict[int, list[Action]] = {}
        self.again: dict[int, Action] = {}
        self.behind: dict[int, list[Action]] = {}

    def lines(self) -> Iterator[Action]:
        for index, action in enumerate(self.compute):
            if action.kind in _BACKWARD:
                self._bring_back(index, action)
        for index, action in enumerate(self.compute):
            yield from self.back.get(index, ())
            if index in self.again:
                yield self.again[index]
            yield action
            yield from self.behind.get(index, ())

    def _bring_back(self, index: int, action: Action) -> None:
        assert action.segment is not None
        segment = self.plan.stages[action.stage][action.segment]
        if segment.choice.is_recomputed:
            self.again[index] = action._replace(kind=Kind.R)
        if segment.choice is not Choice.OFFLOAD:
            return
        made = self.place[action._replace(kind=Kind.F)]
        free = made + segment.free_after
        back = max(free + 1, index - segment.ahead)
        if free + 1 >= index:
            return
        self.behind.setdefault(made, []).insert(0, action._replace(kind=Kind.OFFLOAD))
        self.behind.setdefault(free, []).append(action._replace(kind=Kind.FREE))
        self.back.setdefault(back, []).append(action._replace(kind=Kind.PREFETCH))
        if segment.is_awaited and back < index:
            self.behind.setdefault(back, []).append(action._replace(kind=Kind.AWAIT))


def _parts(action: Action, segments: tuple[Segment, ...]) -> list[Action]:
    """Return an action's segments, in the order in which they run."""
    parts = [action._replace(segment=segment) for segment in range(len(segments))]
    return parts if action.kind is Kind.F else parts[::-1]

"""The activations of a rank along its schedule.

The ledger tells how much each action allocates and frees, and which micro-batches are in flight.
Every count of activations follows these rules: the simulation, the timeline of memory, the tables
of the memory model and the planner's bounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from gems.errors import ScheduleError
from gems.schedule.action import Action, Kind
from gems.schedule.costs import StageCosts
from gems.schedule.schedule import Schedule

TOLERANCE = 1e-9
_F = Kind.F
_B = Kind.B
_I = Kind.I
_W = Kind.W
_R = Kind.R
_FREE = Kind.FREE
_PREFETCH = Kind.PREFETCH
BRINGING_KINDS = frozenset({_F, _I, _R, _PREFETCH})
LEAVING_KINDS = frozenset({_B, _I, _W, _FREE})


class Ledger:
    """The count of activations that a rank holds, and their peak.

    The unit is that of `StageCosts.activation`. F allocates the activations of a stage or segment
    (only its boundary if R follows), R allocates the rest of them, and PREFETCH allocates the part
    that OFFLOAD moved out. I frees everything except the part that W needs, or allocates the
    additional part that W needs. B and W free everything. The part that OFFLOAD moved is freed by
    FREE if the schedule has one, and otherwise when the copy ends.
    """

    __slots__ = (
        "_cap",
        "_costs",
        "_granted",
        "_has_recompute",
        "_leaving",
        "_schedule",
        "held",
        "peak",
    )

    def __init__(self, schedule: Schedule, costs: StageCosts, cap: float | None = None) -> None:
        self._schedule = schedule
        self._costs = costs
        self._cap = cap
        self._has_recompute = schedule.has_any(Kind.R)
        self._leaving: list[tuple[float, float]] = []
        self._granted = 0.0
        self.held = 0.0
        self.peak = 0.0

    def take(self, rank: int, action: Action, now: float) -> float:
        """Allocate for an action, and return the time, `now` or later, at which there is room.

        Under a cap, an action waits for copies that make room; room is given in the order of the
        schedule.

        Raises:
            ScheduleError: there will never be room.
        """
        if action.kind not in BRINGING_KINDS:
            return now
        size = self.brings(action)
        if not size:
            return now
        now = max(now, self._granted)
        while self._leaving and self._leaving[0][0] <= now + TOLERANCE:
            self.held -= heapq.heappop(self._leaving)[1]
        if self._cap is not None:
            while self.held + size > self._cap + TOLERANCE:
                if not self._leaving:
                    raise ScheduleError(
                        rank,
                        action,
                        f"brings {size:g} to {self.held:g} held, above the cap of {self._cap:g}",
                    )
                now, freed = heapq.heappop(self._leaving)
                self.held -= freed
        self._granted = now
        self.held += size
        self.peak = max(self.peak, self.held)
        return now

    def give(self, action: Action) -> None:
        """Free the activations that the end of an action frees."""
        size = self.leaves(action)
        if size:
            self.held -= size
            self.peak = max(self.peak, self.held)

    def give_at(self, action: Action, time: float) -> None:
        """Free the activations that a copy to host memory frees when it ends at `time`."""
        if not self._waits_for(action):
            heapq.heappush(self._leaving, (time, self._costs.moved(action)))

    def brings(self, action: Action) -> float:
        """Return the size that an action allocates before it starts."""
        kind = action[0]
        costs = self._costs
        if kind is _F:
            if self._schedule.forward_only:
                return 0.0
            is_recomputed = self._has_recompute and self._schedule.has(_R, *action[1:])
            return costs.held("boundary" if is_recomputed else "activation", action)
        if kind is _R:
            return costs.held("activation", action) - costs.held("boundary", action)
        if kind is _I:
            return max(
                0.0, costs.held("held_for_weights", action) - costs.held("activation", action)
            )
        return costs.moved(action) if kind is _PREFETCH else 0.0

    def leaves(self, action: Action) -> float:
        """Return the size that an action frees when it ends."""
        kind = action[0]
        costs = self._costs
        if kind is _B:
            return costs.held("activation", action)
        if kind is _I:
            return max(
                0.0, costs.held("activation", action) - costs.held("held_for_weights", action)
            )
        if kind is _FREE:
            return costs.moved(action)
        return costs.held("held_for_weights", action) if kind is _W else 0.0

    def _waits_for(self, copy: Action) -> bool:
        return self._schedule.has_any(Kind.FREE) and self._schedule.has(Kind.FREE, *copy[1:])

    def leaves_at_once(self, action: Action) -> float:
        """Return the size that counts as freed after an action, by the order of the schedule.

        Times are not considered.
        """
        if action.kind is Kind.OFFLOAD:
            return 0.0 if self._waits_for(action) else self._costs.moved(action)
        return self.leaves(action)


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Return the peak activations of each rank, by the order of its schedule alone.

    The result is exact if each copy out is waited for (FREE). A copy without FREE counts as freed
    when it is posted.
    """
    rank_peaks = []
    for actions in schedule.rank_schedules:
        ledger = Ledger(schedule, costs)
        size = peak = 0.0
        for action in actions:
            size += ledger.brings(action)
            peak = max(peak, size)
            size -= ledger.leaves_at_once(action)
            peak = max(peak, size)
        rank_peaks.append(peak)
    return tuple(rank_peaks)


def in_flight(actions: Sequence[Action]) -> Iterator[tuple[Action, Mapping[int, int]]]:
    """Yield each action of a rank with the micro-batches in flight during it, by stage.

    A micro-batch is in flight on a stage from the start of its forward to the end of its
    (input-gradient) backward.
    """
    counts = dict.fromkeys((action.stage for action in actions), 0)
    for action in actions:
        kind = action[0]
        stage = action[1]
        counts[stage] += kind is _F
        yield action, counts
        counts[stage] -= kind is _B or kind is _I

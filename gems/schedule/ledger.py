"""The activations of one rank while its list is played: what each action brings, and what it lets go."""

from __future__ import annotations

import heapq

from gems.errors import ScheduleError
from gems.schedule.action import Action, Kind
from gems.schedule.costs import StageCosts
from gems.schedule.schedule import Schedule

TOLERANCE = 1e-9
BRINGING_KINDS = frozenset({Kind.F, Kind.R, Kind.PREFETCH})


class Ledger:
    """Counts activations held, in the unit of `StageCosts.activation`, and their peak.

    F brings the activations of a stage or segment (only its boundary where R follows), R the rest of them, PREFETCH what
    OFFLOAD took; I leaves what W needs, W and B leave nothing. What OFFLOAD took is let go by FREE where that is in the
    list, and otherwise when the copy has ended. Under a cap, what brings activations waits until copies that
    are under way have made room; room is given in the order of the list.
    """

    __slots__ = ("_cap", "_costs", "_granted", "_has_recompute", "_leaving", "_schedule", "held", "peak")

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
        """Count what an action brings and gives the time, `now` or later, at which there is room for it.

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
                        rank, action, f"brings {size:g} to {self.held:g} held, above the cap of {self._cap:g}"
                    )
                now, left = heapq.heappop(self._leaving)
                self.held -= left
        self._granted = now
        self.held += size
        self.peak = max(self.peak, self.held)
        return now

    def give(self, action: Action) -> None:
        """Count what the end of an action lets go."""
        left = self.leaves(action)
        if left:
            self.held -= left
            self.peak = max(self.peak, self.held)

    def give_at(self, action: Action, time: float) -> None:
        """Count what a copy to host memory lets go when it ends."""
        if not self._waits_for(action):
            heapq.heappush(self._leaving, (time, self._costs.moved(action)))

    def brings(self, action: Action) -> float:
        """Return the size that must be free before an action starts."""
        kind, stage, micro_batch, direction, segment = action
        costs = self._costs
        if kind is Kind.F:
            if self._schedule.forward_only:
                return 0.0
            if self._has_recompute and self._schedule.has(Kind.R, stage, micro_batch, direction, segment):
                return costs.held("boundary", action)
            return costs.held("activation", action)
        if kind is Kind.R:
            return costs.held("activation", action) - costs.held("boundary", action)
        return costs.moved(action) if kind is Kind.PREFETCH else 0.0

    def leaves(self, action: Action) -> float:
        """Return the size that is free once an action of the rank has ended."""
        costs = self._costs
        if action.kind is Kind.B:
            return costs.held("activation", action)
        if action.kind is Kind.I:
            return costs.held("activation", action) - costs.held("held_for_weights", action)
        if action.kind is Kind.FREE:
            return costs.moved(action)
        return costs.held("held_for_weights", action) if action.kind is Kind.W else 0.0

    def _waits_for(self, copy: Action) -> bool:
        _, stage, micro_batch, direction, segment = copy
        return self._schedule.has_any(Kind.FREE) and self._schedule.has(
            Kind.FREE, stage, micro_batch, direction, segment
        )

    def leaves_at_once(self, action: Action) -> float:
        """Return what is counted as gone behind an action, in the order of the list alone."""
        if action.kind is Kind.OFFLOAD:
            return 0.0 if self._waits_for(action) else self._costs.moved(action)
        return self.leaves(action)


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Return the most activations that each rank holds, from the order of its list alone.

    Exact where each copy out is waited for (FREE), or there is none; one that is not counts as gone when it is posted.
    """
    found = []
    for row in schedule.rows:
        ledger = Ledger(schedule, costs)
        held = peak = 0.0
        for action in row:
            held += ledger.brings(action)
            peak = max(peak, held)
            held -= ledger.leaves_at_once(action)
            peak = max(peak, held)
        found.append(peak)
    return tuple(found)

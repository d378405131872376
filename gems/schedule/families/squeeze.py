"""Squeezing: a rank that would wait in an order of F and I runs a later action that is ready."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace

from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule


def squeeze(order: Schedule, most_held: int) -> Schedule:
    """Return the order of F and I in which no rank waits while it could run another action.

    All actions take the same time. This follows the squeezing and reordering of Qi et al. 2024
    ("Pipeline Parallelism with Controllable Memory", section 3). Instead of an action that is not
    ready, a rank takes the first later one that is, as long as at most `most_held` pairs of stage
    and micro-batch are held on the way; it runs a W if there is none. The F of a stage keep their
    order, and so do the I. Only the actions of the first and the last micro-batches move: a block
    that repeats without a wait stays unchanged.
    """
    return _Squeezing(order, most_held).schedule()


class _Squeezing:
    """A simulation of all ranks at once.

    A micro-batch passes through 2 S places: F of all stages, and then I.
    """

    def __init__(self, order: Schedule, most_held: int) -> None:
        ranks = range(order.num_ranks)
        self.order, self.most_held, self.num_places = order, most_held, 2 * order.num_stages
        self.ended: dict[tuple[int, int], int] = {}
        self.todo = [deque(actions) for actions in order.rank_schedules]
        self.rank_schedules: list[list[Action]] = [[] for _ in ranks]
        self.in_flight = [0 for _ in ranks]  # F without their I
        self.owed = [0 for _ in ranks]  # I without their W
        self.busy = [0 for _ in ranks]
        self.events = [(0, rank) for rank in ranks]

    def schedule(self) -> Schedule:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.busy[rank] <= now:
                self.advance(rank, now)
        return replace(self.order, rank_schedules=tuple(map(tuple, self.rank_schedules)))

    def advance(self, rank: int, now: int) -> None:
        """Start an action of a free rank if one is ready; otherwise an arrival wakes the rank."""
        index = self.first_ready(rank, now)
        is_full = self.in_flight[rank] + self.owed[rank] >= self.most_held
        if index is None or (is_full and self.owed[rank] and self.todo[rank][index].kind is Kind.F):
            if not self.owed[rank]:
                return
            self.owed[rank] -= 1
        else:
            action = self.todo[rank][index]
            del self.todo[rank][index]
            self.rank_schedules[rank].append(action)
            is_forward = action.kind is Kind.F
            self.in_flight[rank] += 1 if is_forward else -1
            self.owed[rank] += not is_forward
            place = self.place(action)
            m = action.micro_batch or 0
            self.ended[place, m] = now + 1
            if place + 1 < self.num_places:
                stage = min(place + 1, self.num_places - 2 - place)
                heapq.heappush(self.events, (now + 1, self.order.placement.rank_of(0, stage)))
        self.busy[rank] = now + 1
        heapq.heappush(self.events, (now + 1, rank))

    def first_ready(self, rank: int, now: int) -> int | None:
        """Return the index of the first action that may run now."""
        seen: set[tuple[int, Kind]] = set()
        in_flight = most_in_flight = self.in_flight[rank]
        for index, action in enumerate(self.todo[rank]):
            is_forward = action.kind is Kind.F
            if (action.stage, action.kind) not in seen and (
                not is_forward or not index or most_in_flight < self.most_held
            ):
                place = self.place(action)
                if (
                    not place
                    or self.ended.get((place - 1, action.micro_batch or 0), now + 1) <= now
                ):
                    return index
            seen.add((action.stage, action.kind))
            if len(seen) == 2 * len(self.order.placement.stages_on(rank)):
                return None
            in_flight += 1 if is_forward else -1
            most_in_flight = max(most_in_flight, in_flight)
        return None

    def place(self, action: Action) -> int:
        return action.stage if action.kind is Kind.F else self.num_places - 1 - action.stage

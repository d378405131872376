"""Replay: runs a schedule on paper, action by action, with a cost for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gems.errors import ScheduleError
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies
from gems.schedule.schedule import Schedule

Cost = Callable[[Action], float]


@dataclass(frozen=True, slots=True)
class Replay:
    """When each action ran, in the units of the cost.

    `start` and `end` follow `Schedule.rows`; for a transfer they are the posting and the arrival.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    span: float
    busy: tuple[float, ...]
    peak_units: tuple[int, ...]

    @property
    def efficiency(self) -> float:
        """Useful compute over ranks x span."""
        return sum(self.busy) / (len(self.busy) * self.span) if self.span else 1.0


def uniform_cost(forward: float, backward: float) -> Cost:
    """Gives the same cost to every forward and to every backward, and none to the rest."""
    costs = {Kind.F: forward, Kind.B: backward}
    return lambda action: costs.get(action.kind, 0.0)


def replay(schedule: Schedule, cost: Cost, link: float = 0.0) -> Replay:
    """Plays all ranks forward at once. Transfers post and take `link`; who needs the data waits.

    Args:
        schedule: compute-only or lowered.
        cost: time of an action on its rank.
        link: time from the moment that both sides of a transfer are posted to its arrival.

    Raises:
        ScheduleError: an action waits for something that never comes (a deadlock, or a missing partner).
    """
    return _Player(schedule, cost, link).play()


class _Player:
    def __init__(self, schedule: Schedule, cost: Cost, link: float) -> None:
        self.schedule = schedule
        self.cost = cost
        self.link = link
        self.clock = [0.0] * schedule.num_ranks
        self.next = [0] * schedule.num_ranks
        self.start: list[list[float]] = [[] for _ in schedule.rows]
        self.end: list[list[float]] = [[] for _ in schedule.rows]
        self.done: dict[Action, float] = {}
        self.posted: dict[Action, float] = {}
        self.places: dict[Action, tuple[int, int]] = {}
        self.waiting: dict[Action, list[int]] = {}
        self.arrived: dict[int, dict[int, float]] = {}
        self.ready = deque(range(schedule.num_ranks))

    def play(self) -> Replay:
        while self.ready:
            rank = self.ready.popleft()
            while self.next[rank] < len(self.schedule.rows[rank]):
                if not self.advance(rank, self.schedule.rows[rank][self.next[rank]]):
                    break
                self.next[rank] += 1
        self.refuse_stuck()
        span = max((max(row, default=0.0) for row in self.end), default=0.0)
        busy = tuple(
            sum(
                end - start
                for action, start, end in zip(row, starts, ends, strict=True)
                if action.kind in COMPUTE_KINDS
            )
            for row, starts, ends in zip(self.schedule.rows, self.start, self.end, strict=True)
        )
        return Replay(
            tuple(map(tuple, self.start)), tuple(map(tuple, self.end)), span, busy, peak_units(self.schedule)
        )

    def advance(self, rank: int, action: Action) -> bool:
        """Runs one action when it can run; otherwise remembers who must wake this rank."""
        if action.kind is Kind.REDUCE_GRAD:
            return self.reduce(rank, action)
        if action.kind in RECV_KINDS:
            self.post(rank, action, dependencies(action, self.schedule)[0], action)
            return True
        here = self.clock[rank]
        for need in dependencies(action, self.schedule):
            if need not in self.done:
                self.waiting.setdefault(need, []).append(rank)
                return False
            delay = self.link if self.crosses(need, action) else 0.0
            here = max(here, self.done[need] + delay)
        if action.kind in SEND_KINDS:
            send = action
            stage = action.stage + (1 if action.kind is Kind.SEND_F else -1)
            kind = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_B
            self.post(rank, action, send, Action(kind, stage, action.micro_batch, action.direction))
            return True
        finish = here + self.cost(action)
        self.clock[rank] = finish
        self.stamp(rank, here, finish)
        if action.kind in COMPUTE_KINDS:
            self.finish(action, finish)
        return True

    def crosses(self, need: Action, action: Action) -> bool:
        """Whether compute-only data comes from another rank, so that the link's time is still to be paid."""
        return (
            need.kind in COMPUTE_KINDS
            and action.kind in COMPUTE_KINDS
            and self.schedule.rank_of(need) != self.schedule.rank_of(action)
        )

    def post(self, rank: int, action: Action, send: Action, receive: Action) -> None:
        """Posts one side of a transfer; the data arrives a link's time after both sides are posted."""
        now = self.clock[rank]
        self.posted[action] = now
        self.places[action] = (rank, len(self.start[rank]))
        self.stamp(rank, now, now)
        if send in self.posted and receive in self.posted:
            arrival = max(self.posted[send], self.posted[receive]) + self.link
            for side in (send, receive):
                at_rank, index = self.places[side]
                self.end[at_rank][index] = arrival
            self.finish(receive, arrival)

    def reduce(self, rank: int, action: Action) -> bool:
        """Joins a collective; the last peer to come lets all of them go on."""
        group = self.arrived.setdefault(action.stage, {})
        peers = self.schedule.placement.peers_of(rank)
        if rank not in group:
            group[rank] = self.clock[rank]
            if len(group) < len(peers):
                return False
            self.ready.extend(peer for peer in peers if peer != rank)
        elif len(group) < len(peers):
            return False
        begin = self.clock[rank]
        self.clock[rank] = max(group.values()) + self.cost(action)
        self.stamp(rank, begin, self.clock[rank])
        return True

    def stamp(self, rank: int, start: float, end: float) -> None:
        self.start[rank].append(start)
        self.end[rank].append(end)

    def finish(self, action: Action, time: float) -> None:
        self.done[action] = time
        self.ready.extend(self.waiting.pop(action, ()))

    def refuse_stuck(self) -> None:
        for rank, row in enumerate(self.schedule.rows):
            if self.next[rank] < len(row):
                action = row[self.next[rank]]
                needs = [str(need) for need in dependencies(action, self.schedule) if need not in self.done]
                what = f"waits for {', '.join(needs)}" if needs else "waits for its peers"
                raise ScheduleError(rank, action, f"{what}, which never comes")


def peak_units(schedule: Schedule) -> tuple[int, ...]:
    """Gives for each rank the most micro-batch activations held at once: up at F, down at B."""
    peaks = []
    for row in schedule.rows:
        held = peak = 0
        for action in row:
            held += {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)

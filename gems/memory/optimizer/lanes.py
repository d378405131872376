"""A rank's compute actions and what is free during each, as the windows of copies are fitted into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gems.memory.case import Outcome
from gems.memory.walk import Point
from gems.schedule.action import COMPUTE_KINDS, Action, Kind

Place = tuple[int, int]  # stage and segment


@dataclass(slots=True)
class Span:
    """One copy of one micro-batch on a rank: made at place `made`, needed at place `needed` of its compute actions.

    During the next action `next_bytes` more are held when the copy is not waited for, `out_bytes` during later ones: the
    next segment holds what it was given anyway. `back_bytes` are held from the posting of the copy back.
    """

    place: Place
    made: int
    needed: int
    next_bytes: int
    out_bytes: int
    back_bytes: int = 0

    def out_bytes_at(self, index: int) -> int:
        """Return what is held at a compute action where the copy is not waited for before it."""
        return self.next_bytes if index == self.made + 1 else self.out_bytes

    def mirrored(self, num_actions: int) -> Span:
        """Return the copy back as a copy out, on a rank whose compute actions run the other way."""
        last = num_actions - 1
        return Span(self.place, last - self.needed, last - self.made, self.back_bytes, self.back_bytes)


@dataclass(slots=True)
class Lane:
    """A rank: its copies in the order in which they are made, and of each compute action the bytes that are free during it.

    `ends` are the seconds at which each would end without a wait.
    """

    room: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def lane_of(tight: Outcome, rank: int, limit_bytes: int) -> Lane:
    """Read a rank's played list, in which copies are waited for at once and fetched on demand."""
    points = tight.ranks[rank].points
    lane = Lane([limit_bytes - during for during in _during_bytes(points)])
    made: dict[Action, Span] = {}
    places: dict[Action, int] = {}
    before = points[0].device_bytes if points else 0
    for point in points:
        action = point.action
        forward = action._replace(kind=Kind.F)
        if is_compute(action):
            if action.kind is Kind.F:
                places[action] = len(lane.ends)
            lane.ends.append((lane.ends[-1] if lane.ends else 0.0) + tight.costs.time(action))
        elif action.kind is Kind.OFFLOAD and action.segment is not None:
            place = (action.stage, action.segment)
            made[forward] = Span(place, places[forward], 0, 0, point.moved_bytes)
            lane.spans.append(made[forward])
        elif action.kind is Kind.FREE:
            made[forward].next_bytes = before - point.device_bytes
        elif action.kind is Kind.PREFETCH:
            made[forward].needed, made[forward].back_bytes = len(lane.ends), point.device_bytes - before
        before = point.device_bytes
    return lane


def excess_bytes(outcome: Outcome, limit_bytes: int) -> list[list[int]]:
    """Return by how much each compute action of each rank is above the limit, with what is posted before it."""
    return [[max(0, during - limit_bytes) for during in _during_bytes(rank.points)] for rank in outcome.ranks]


def _during_bytes(points: Sequence[Point]) -> list[int]:
    """Return the most that a rank holds during each compute action, with what stands between it and the one before."""
    found: list[int] = []
    during = 0
    for point in points:
        during = max(during, point.during_bytes)
        if is_compute(point.action):
            found.append(during)
            during = 0
        elif point.action.kind is Kind.FREE:
            during = 0
    return found


def is_compute(action: Action) -> bool:
    """Whether an action counts among a rank's compute actions; a second run belongs to the backward behind it."""
    return action.kind in COMPUTE_KINDS and action.kind is not Kind.R

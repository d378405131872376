"""The windows of copies out and back: as wide as memory allows, then shortened to their use."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from gems.memory.case import PlanOutcome
from gems.memory.plan import MemoryPlan, Place, Segment, place_of
from gems.memory.timeline import Point
from gems.schedule.action import COMPUTE_KINDS, Action, Kind

Simulate = Callable[[MemoryPlan], PlanOutcome]
Widths = dict[Place, int]
# how often windows are built again with less room, if the timeline exceeds the limit
TRIALS = 4


class WindowOrder(Enum):
    """The order in which copies claim memory."""

    OUT_FIRST = "out first"
    BACK_FIRST = "back first"
    SHORTEST_FIRST = "shortest first"


def with_windows(
    plan: MemoryPlan,
    limit_bytes: int,
    simulate: Simulate,
    orders: Sequence[WindowOrder] = (WindowOrder.OUT_FIRST,),
) -> PlanOutcome:
    """Set a plan's distances and simulate it; return the fastest result of several orders.

    In the first two orders, copies out are awaited only when an action would lack memory, the
    earliest first, and copies back are posted as early as memory allows, in the order of their use.
    In the third, windows grow by one action at a time, the shortest in seconds first. If the
    timeline exceeds the limit at an action, that action gets less room.
    """
    tight = simulate(set_distances(plan, {}, {}))
    has_copies = any(segment.choice.is_copied for stage in plan.stages for segment in stage)
    if not has_copies or max(tight.peak_bytes) > limit_bytes:
        return tight
    best = tight
    for order in orders:
        ranks = [_RankWindows(tight, rank, limit_bytes) for rank in range(len(tight.ranks))]
        for _ in range(TRIALS):
            if order is WindowOrder.SHORTEST_FIRST:
                widths = _even(plan, ranks)
            else:
                widths = _widest(ranks, order is WindowOrder.BACK_FIRST)
            outcome = simulate(set_distances(plan, *widths))
            if max(outcome.peak_bytes) <= limit_bytes:
                best = outcome if outcome.step_s < best.step_s else best
                break
            for windows, rank in zip(ranks, outcome.ranks, strict=True):
                during = _during_bytes(rank.points)
                windows.room = [
                    room - max(0, during_bytes - limit_bytes)
                    for room, during_bytes in zip(windows.room, during, strict=True)
                ]
    return best


def set_distances(plan: MemoryPlan, free: Widths | None, ahead: Widths | None) -> MemoryPlan:
    """Set the distances of a plan's copied segments: 0 if missing, unchanged for None."""

    def change(place: Place, segment: Segment) -> Segment:
        if not segment.choice.is_copied:
            return segment
        return replace(
            segment,
            free_after=segment.free_after if free is None else free.get(place, 0),
            ahead=segment.ahead if ahead is None else ahead.get(place, 0),
            is_awaited=False,
        )

    return plan.changed(change)


@dataclass(slots=True)
class _Window:
    """One copy of one micro-batch on a rank, with the indices of its two compute actions."""

    place: Place
    made: int
    needed: int
    next_bytes: int  # held during the next action if the copy is not awaited before
    out_bytes: int  # held during later actions; the next segment holds its inputs in any case
    back_bytes: int = 0  # from the posting of the copy back

    def out_bytes_at(self, index: int) -> int:
        """Return the bytes held at a compute action if the copy is not awaited before it."""
        return self.next_bytes if index == self.made + 1 else self.out_bytes


class _RankWindows:
    """The copies of a rank, in order, from a plan that awaits them at once and fetches on demand.

    `room` has the free bytes during each compute action, and `ends` the seconds at which each
    action would end without waits.
    """

    def __init__(self, tight: PlanOutcome, rank: int, limit_bytes: int) -> None:
        points = tight.ranks[rank].points
        self.room = [limit_bytes - during for during in _during_bytes(points)]
        self.ends: list[float] = []
        self.copies: list[_Window] = []
        windows: dict[Action, _Window] = {}
        places: dict[Action, int] = {}
        before = points[0].device_bytes if points else 0
        for point in points:
            action = point.action
            forward = point.action._replace(kind=Kind.F)
            if _is_counted(action):
                places[action] = len(self.ends)
                self.ends.append((self.ends[-1] if self.ends else 0.0) + tight.costs.time(action))
            elif action.kind is Kind.OFFLOAD:
                windows[forward] = _Window(
                    place_of(action), places[forward], 0, 0, point.moved_bytes
                )
                self.copies.append(windows[forward])
            elif action.kind is Kind.FREE:
                windows[forward].next_bytes = before - point.device_bytes
            elif action.kind is Kind.PREFETCH:
                windows[forward].needed, windows[forward].back_bytes = (
                    len(self.ends),
                    point.device_bytes - before,
                )
            before = point.device_bytes

    def length_s(self, copy: _Window, width: int, is_back: bool) -> float:
        """Return the seconds of a window of `width` actions."""
        if is_back:
            last = max(copy.made, copy.needed - width)
            return self.ends[copy.needed - 1] - (self.ends[last - 1] if last else 0.0)
        return self.ends[min(copy.needed - 1, copy.made + width)] - self.ends[copy.made]


def _during_bytes(points: Sequence[Point]) -> list[int]:
    """Return the peak of a rank during each compute action and the postings before it."""
    peaks: list[int] = []
    during = 0
    for point in points:
        during = max(during, point.during_bytes)
        if _is_counted(point.action):
            peaks.append(during)
        if _is_counted(point.action) or point.action.kind is Kind.FREE:
            during = 0
    return peaks


def _is_counted(action: Action) -> bool:
    """Return whether an action is a compute action; a recompute belongs to its backward."""
    return action.kind in COMPUTE_KINDS and action.kind is not Kind.R


def _widest(ranks: Sequence[_RankWindows], back_first: bool) -> tuple[Widths, Widths]:
    """Return the distances out and back: of each segment, the least of all micro-batches."""
    both: tuple[Widths, Widths] = ({}, {})
    order = (_back, _out) if back_first else (_out, _back)
    for windows in ranks:
        room = list(windows.room)
        first = dict[int, int]()
        for get in order:
            first = get(windows.copies, room, first)
            widths = both[get is _back]
            for index, width in first.items():
                place = windows.copies[index].place
                widths[place] = min(widths.get(place, width), width)
    return both


def _out(copies: Sequence[_Window], room: list[int], ahead: dict[int, int]) -> dict[int, int]:
    """Return each copy's window out in compute actions, and subtract its bytes from the room.

    At an action without enough room, the copies that were posted first are awaited.
    """
    widths: dict[int, int] = {}
    under_way: list[int] = []
    waiting = sorted(range(len(copies)), key=lambda number: copies[number].made)
    for index in range(len(room)):
        while waiting and copies[waiting[0]].made < index:
            under_way.append(waiting.pop(0))
        for number in [
            number for number in under_way if copies[number].needed - ahead.get(number, 0) <= index
        ]:
            under_way.remove(number)
            widths[number] = index - 1 - copies[number].made
        taken = sum(copies[number].out_bytes_at(index) for number in under_way)
        while under_way and taken > room[index]:
            number = under_way.pop(0)
            taken -= copies[number].out_bytes_at(index)
            widths[number] = index - 1 - copies[number].made
        room[index] -= taken
    return {number: max(0, width) for number, width in widths.items()}


def _back(copies: Sequence[_Window], room: list[int], free: dict[int, int]) -> dict[int, int]:
    """Return each copy's window back, by `_out` with time reversed."""
    last = len(room) - 1
    mirrored = [
        _Window(
            window.place,
            last - window.needed,
            last - window.made,
            window.back_bytes,
            window.back_bytes,
        )
        for window in copies
    ]
    room.reverse()
    widths = _out(mirrored, room, free)
    room.reverse()
    return widths


def _even(plan: MemoryPlan, ranks: Sequence[_RankWindows]) -> tuple[Widths, Widths]:
    """Return the distances out and back, which grow in turn."""
    rooms = [list(windows.room) for windows in ranks]
    widths: tuple[Widths, Widths] = ({}, {})
    queue: list[tuple[float, int, Place, bool]] = []
    for stage, segments in enumerate(plan.stages):
        for index, segment in enumerate(segments):
            if segment.choice.is_copied:
                queue += [
                    (0.0, len(queue) + is_back, (stage, index), is_back)
                    for is_back in (False, True)
                ]
    while queue:
        _, order, place, is_back = heapq.heappop(queue)
        width = widths[is_back].get(place, 0) + 1
        copies = [
            (windows, room, copy)
            for windows, room in zip(ranks, rooms, strict=True)
            for copy in windows.copies
            if copy.place == place
        ]
        taken: list[tuple[list[int], int, int]] = []
        for _, room, copy in copies:
            at = copy.needed - width if is_back else copy.made + width
            if copy.made < at < copy.needed:
                num_bytes = copy.back_bytes if is_back else copy.out_bytes_at(at)
                room[at] -= num_bytes
                taken.append((room, at, num_bytes))
        if taken and all(room[at] >= 0 for room, at, _ in taken):
            widths[is_back][place] = width
            length_s = min(windows.length_s(copy, width, is_back) for windows, _, copy in copies)
            heapq.heappush(queue, (length_s, order, place, is_back))
            continue
        for room, at, num_bytes in taken:
            room[at] += num_bytes
    return widths


def shortened(outcome: PlanOutcome, limit_bytes: int, simulate: Simulate) -> PlanOutcome:
    """Shorten the windows of a simulated plan to their use, with the same step time.

    Segments whose windows meet, so that nothing is ever copied, become kept or recomputed ones.
    """
    moved = {
        place_of(action)
        for actions in outcome.schedule.rank_schedules
        for action in actions
        if action.kind is Kind.OFFLOAD
    }

    def uncopied_if_idle(place: Place, segment: Segment) -> Segment:
        if not segment.choice.is_copied or place in moved:
            return segment
        return Segment(segment.first, segment.end, segment.choice.uncopied)

    def if_as_good(outcome: PlanOutcome, plan: MemoryPlan) -> PlanOutcome:
        other = simulate(plan)
        fits = max(other.peak_bytes) <= max(limit_bytes, *outcome.peak_bytes)
        return other if fits and other.step_s <= outcome.step_s * (1 + 1e-9) else outcome

    outcome = if_as_good(outcome, outcome.plan.changed(uncopied_if_idle))
    ordered = if_as_good(outcome, set_distances(outcome.plan, None, _in_order(outcome)))
    free, ahead = _used(ordered)
    for widths in ((free, ahead), (free, None), (None, ahead)):
        shorter = if_as_good(ordered, set_distances(ordered.plan, *widths))
        if shorter is not ordered:
            return shorter
    return ordered


def _in_order(outcome: PlanOutcome) -> Widths:
    """Return windows in which no copy back is posted before one that is needed sooner."""
    ahead: Widths = {}
    for actions in outcome.schedule.rank_schedules:
        index_of = _indices(actions)
        latest = 0
        for needed, action in sorted(
            (index_of[action], action) for action in actions if action.kind is Kind.PREFETCH
        ):
            place = place_of(action)
            latest = max(latest, needed - outcome.plan.segment(place).ahead)
            ahead[place] = max(ahead.get(place, 0), needed - latest)
    return ahead


def _used(outcome: PlanOutcome) -> tuple[Widths, Widths]:
    """Return the used parts of the windows of simulated copies, out and back.

    A copy out is awaited when it has ended in any case. A copy back is posted at the last action
    from which it and the later ones are in time.
    """
    free: Widths = {}
    ahead: Widths = {}
    for rank, actions in enumerate(outcome.schedule.rank_schedules):
        start = outcome.simulation.start[rank]
        end = outcome.simulation.end[rank]
        index_of = _indices(actions)
        compute = [index for index, action in enumerate(actions) if _is_counted(action)]
        latest: list[tuple[int, float, Action]] = []
        for index, action in enumerate(actions):
            if action.kind is Kind.OFFLOAD:
                place = place_of(action)
                forward = index_of[action]
                width = outcome.plan.segment(place).free_after
                used = next(
                    (w for w in range(width) if end[compute[forward + w]] >= end[index]), width
                )
                free[place] = max(free.get(place, 0), used)
            elif action.kind is Kind.PREFETCH:
                latest.append((index_of[action], end[index] - start[index], action))
        before = math.inf
        for needed, copy_s, action in sorted(latest, reverse=True):
            place = place_of(action)
            width = outcome.plan.segment(place).ahead
            before = min(before, start[compute[needed]]) - copy_s
            used = next((w for w in range(width) if start[compute[needed - w]] <= before), width)
            ahead[place] = max(ahead.get(place, 0), used)
    return free, ahead


def _indices(actions: Sequence[Action]) -> dict[Action, int]:
    """Return the index of each copy's forward (for copies out) or backward."""
    indices: dict[Action, int] = {}
    for index, action in enumerate(filter(_is_counted, actions)):
        if action.kind is not Kind.W:
            indices[
                action._replace(kind=Kind.OFFLOAD if action.kind is Kind.F else Kind.PREFETCH)
            ] = index
    return indices

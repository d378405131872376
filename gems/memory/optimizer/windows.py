"""When copies leave and come back: windows as wide as the bytes allow, then shortened to what copies used."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.timeline import Point
from gems.schedule.action import COMPUTE_KINDS, Action, Kind

Place = tuple[int, int]  # stage and segment
Widths = dict[Place, int]
TRIALS = 4  # how often windows are made anew with less room, where the timeline finds more than was counted


class WindowOrder(Enum):
    """Who has the first choice of bytes: copies out, copies back, or each as long as its window is the shortest."""

    OUT_FIRST = "out first"
    BACK_FIRST = "back first"
    SHORTEST_FIRST = "shortest first"


def with_windows(
    case: MemoryCase,
    plan: MemoryPlan,
    limit_bytes: int,
    simulate: Callable[[MemoryPlan], PlanOutcome],
    ways: Sequence[WindowOrder] = (WindowOrder.OUT_FIRST,),
) -> PlanOutcome:
    """Return a plan its distances and simulate it; of several ways the fastest.

    With the first two ways copies out are waited for only where an action would lack bytes, the one posted first before
    the others, and copies back posted as early as the bytes allow, in the order in which they are needed. With the
    third each window grows by one action at a time, the shortest in seconds first. Where the timeline finds more than
    was counted, that action gets less room.
    """
    tight = simulate(set_distances(plan, {}, {}))
    has_copies = any(segment.choice is Choice.OFFLOAD for stage in plan.stages for segment in stage)
    if not has_copies or max(tight.peak_bytes) > limit_bytes:
        return tight
    best = tight
    for way in ways:
        ranks = [rank_windows(tight, rank, limit_bytes) for rank in range(len(tight.ranks))]
        for _ in range(TRIALS):
            widths = (
                _even(plan, ranks)
                if way is WindowOrder.SHORTEST_FIRST
                else _widest(ranks, way is WindowOrder.BACK_FIRST)
            )
            found = simulate(set_distances(plan, *widths))
            if max(found.peak_bytes) <= limit_bytes:
                best = found if found.step_s < best.step_s else best
                break
            for windows, excess in zip(ranks, excess_bytes(found, limit_bytes), strict=True):
                windows.room = [room - over for room, over in zip(windows.room, excess, strict=True)]
    return best


def set_distances(plan: MemoryPlan, free: Widths | None, ahead: Widths | None) -> MemoryPlan:
    """Return a plan with these distances for its offloaded segments: 0 if not given, as they are if None."""
    stages = []
    for stage, segments in enumerate(plan.stages):
        made = []
        for index, segment in enumerate(segments):
            if segment.choice is Choice.OFFLOAD:
                place = (stage, index)
                segment = replace(
                    segment,
                    free_after=segment.free_after if free is None else free.get(place, 0),
                    ahead=segment.ahead if ahead is None else ahead.get(place, 0),
                    is_awaited=False,
                )
            made.append(segment)
        stages.append(tuple(made))
    return replace(plan, stages=tuple(stages))


def _widest(ranks: Sequence[RankWindows], back_first: bool) -> tuple[Widths, Widths]:
    """Return the distances out and back; a segment's are those of the micro-batch and rank with the least."""
    free: Widths = {}
    ahead: Widths = {}
    for windows in ranks:
        room = list(windows.room)
        first = (_back if back_first else _out)(windows.spans, room, {})
        second = (_out if back_first else _back)(windows.spans, room, first)
        for widths, found in ((free, second if back_first else first), (ahead, first if back_first else second)):
            for index, width in found.items():
                place = windows.spans[index].place
                widths[place] = min(widths.get(place, width), width)
    return free, ahead


def _out(spans: Sequence[CopyWindow], room: list[int], ahead: dict[int, int]) -> dict[int, int]:
    """Return each copy's window out in compute actions, and take its bytes from the room.

    At an action that lacks bytes the copies are waited for that were posted first: they have ended first.
    """
    widths: dict[int, int] = {}
    under_way: list[int] = []
    waiting = sorted(range(len(spans)), key=lambda each: spans[each].made)
    for index in range(len(room)):
        while waiting and spans[waiting[0]].made < index:
            under_way.append(waiting.pop(0))
        for each in [each for each in under_way if spans[each].needed - ahead.get(each, 0) <= index]:
            under_way.remove(each)
            widths[each] = index - 1 - spans[each].made
        taken = sum(spans[each].out_bytes_at(index) for each in under_way)
        while under_way and taken > room[index]:
            each = under_way.pop(0)
            taken -= spans[each].out_bytes_at(index)
            widths[each] = index - 1 - spans[each].made
        room[index] -= taken
    return {each: max(0, width) for each, width in widths.items()}


def _back(spans: Sequence[CopyWindow], room: list[int], free: dict[int, int]) -> dict[int, int]:
    """Return each copy's window back: `_out` with time the other way, so what is needed last is posted last."""
    mirrored = room[::-1]
    widths = _out([span.mirrored(len(room)) for span in spans], mirrored, free)
    room[:] = mirrored[::-1]
    return widths


def _even(plan: MemoryPlan, ranks: Sequence[RankWindows]) -> tuple[Widths, Widths]:
    """Return the distances out and back, grown from none."""
    rooms = [list(windows.room) for windows in ranks]
    free: Widths = {}
    ahead: Widths = {}
    queue: list[tuple[float, int, Place, bool]] = []
    for stage, segments in enumerate(plan.stages):
        for index, segment in enumerate(segments):
            if segment.choice is Choice.OFFLOAD:
                for is_back in (False, True):
                    heapq.heappush(queue, (0.0, len(queue), (stage, index), is_back))
    while queue:
        _, order, place, is_back = heapq.heappop(queue)
        widths = ahead if is_back else free
        width = widths.get(place, 0) + 1
        if _take(ranks, rooms, place, width, is_back):
            widths[place] = width
            length_s = min(_length_s(windows, span, width, is_back) for windows, span in _spans(ranks, place))
            heapq.heappush(queue, (length_s, order, place, is_back))
    return free, ahead


def _spans(ranks: Sequence[RankWindows], place: Place) -> list[tuple[RankWindows, CopyWindow]]:
    return [(windows, span) for windows in ranks for span in windows.spans if span.place == place]


def _take(ranks: Sequence[RankWindows], rooms: list[list[int]], place: Place, width: int, is_back: bool) -> bool:
    """Take the bytes of one more action in a window, of every micro-batch, if there are bytes for all."""
    taken: list[tuple[list[int], int, int]] = []
    for windows, room in zip(ranks, rooms, strict=True):
        for _, span in _spans([windows], place):
            at = span.needed - width if is_back else span.made + width
            if span.made < at < span.needed:
                num_bytes = span.back_bytes if is_back else span.out_bytes_at(at)
                room[at] -= num_bytes
                taken.append((room, at, num_bytes))
    if taken and all(room[at] >= 0 for room, at, _ in taken):
        return True
    for room, at, num_bytes in taken:
        room[at] += num_bytes
    return False


def _length_s(windows: RankWindows, span: CopyWindow, width: int, is_back: bool) -> float:
    if is_back:
        last = max(span.made, span.needed - width)
        return windows.ends[span.needed - 1] - (windows.ends[last - 1] if last else 0.0)
    return windows.ends[min(span.needed - 1, span.made + width)] - windows.ends[span.made]


@dataclass(slots=True)
class CopyWindow:
    """One copy of one micro-batch on a rank: made at place `made`, needed at place `needed` of its compute actions.

    During the next action `next_bytes` more are held when the copy is not waited for, `out_bytes` during later ones:
    the next segment holds what it was given anyway. `back_bytes` are held from the posting of the copy back.
    """

    place: Place
    made: int
    needed: int
    next_bytes: int
    out_bytes: int
    back_bytes: int = 0

    def out_bytes_at(self, index: int) -> int:
        """Return the bytes held at a compute action if the copy is not waited for before it."""
        return self.next_bytes if index == self.made + 1 else self.out_bytes

    def mirrored(self, num_actions: int) -> CopyWindow:
        """Return the copy back as a copy out, on a rank whose compute actions run the other way."""
        last = num_actions - 1
        return CopyWindow(self.place, last - self.needed, last - self.made, self.back_bytes, self.back_bytes)


@dataclass(slots=True)
class RankWindows:
    """The copies of a rank in the order in which they are made, and the bytes that are free during each compute action.

    `ends` are the seconds at which each would end without a wait.
    """

    room: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    spans: list[CopyWindow] = field(default_factory=list)


def rank_windows(tight: PlanOutcome, rank: int, limit_bytes: int) -> RankWindows:
    """Read a rank's simulated schedule, in which copies are waited for at once and fetched on demand."""
    points = tight.ranks[rank].points
    windows = RankWindows([limit_bytes - during for during in _during_bytes(points)])
    made: dict[Action, CopyWindow] = {}
    places: dict[Action, int] = {}
    before = points[0].device_bytes if points else 0
    for point in points:
        action = point.action
        forward = action._replace(kind=Kind.F)
        if is_compute(action):
            if action.kind is Kind.F:
                places[action] = len(windows.ends)
            windows.ends.append((windows.ends[-1] if windows.ends else 0.0) + tight.costs.time(action))
        elif action.kind is Kind.OFFLOAD and action.segment is not None:
            place = (action.stage, action.segment)
            made[forward] = CopyWindow(place, places[forward], 0, 0, point.moved_bytes)
            windows.spans.append(made[forward])
        elif action.kind is Kind.FREE:
            made[forward].next_bytes = before - point.device_bytes
        elif action.kind is Kind.PREFETCH:
            made[forward].needed, made[forward].back_bytes = len(windows.ends), point.device_bytes - before
        before = point.device_bytes
    return windows


def excess_bytes(outcome: PlanOutcome, limit_bytes: int) -> list[list[int]]:
    """Return by how much each compute action of each rank is above the limit, with what is posted before it."""
    return [[max(0, during - limit_bytes) for during in _during_bytes(rank.points)] for rank in outcome.ranks]


def _during_bytes(points: Sequence[Point]) -> list[int]:
    """Return the peak of a rank during each compute action and what is posted before it."""
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
    """Whether an action counts among a rank's compute actions; a recompute belongs to the backward after it."""
    return action.kind in COMPUTE_KINDS and action.kind is not Kind.R


BACKWARD = (Kind.B, Kind.I)


def shortened(outcome: PlanOutcome, limit_bytes: int, simulate: Callable[[MemoryPlan], PlanOutcome]) -> PlanOutcome:
    """Shorten the windows of a simulated plan to what its copies used, at the same step time.

    What no copy ever takes is kept, and said to be.
    """
    outcome = _if_as_good(outcome, simulate(_without_idle(outcome)), limit_bytes)
    ordered = _if_as_good(outcome, simulate(set_distances(outcome.plan, None, _in_order(outcome))), limit_bytes)
    free, ahead = _used(ordered)
    for widths in ((free, ahead), (free, None), (None, ahead)):
        found = _if_as_good(ordered, simulate(set_distances(ordered.plan, *widths)), limit_bytes)
        if found is not ordered:
            return found
    return ordered


def _if_as_good(outcome: PlanOutcome, other: PlanOutcome, limit_bytes: int) -> PlanOutcome:
    fits = max(other.peak_bytes) <= max(limit_bytes, *outcome.peak_bytes)
    return other if fits and other.step_s <= outcome.step_s * (1 + 1e-9) else outcome


def _without_idle(outcome: PlanOutcome) -> MemoryPlan:
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


def _in_order(outcome: PlanOutcome) -> Widths:
    """Return windows in which no copy back is posted before one that is needed sooner."""
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


def _used(outcome: PlanOutcome) -> tuple[Widths, Widths]:
    """Return what the simulated copies used of their windows, out and back.

    A copy out is waited for where it has ended by then anyway, a copy back posted at the last action from which it and
    those after it still come in time.
    """
    free: Widths = {}
    ahead: Widths = {}
    for rank, row in enumerate(outcome.schedule.rows):
        start, end = outcome.simulation.start[rank], outcome.simulation.end[rank]
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

"""When copies leave and come back: the distances of a plan's offloaded segments, as wide as the bytes allow."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from gems.memory.case import MemoryCase, Outcome
from gems.memory.optimizer.lanes import Lane, Place, Span, excess_bytes, lane_of
from gems.memory.plan import Choice, MemoryPlan

TRIALS = 4  # how often windows are made anew with less room, where the walk finds more than was counted
Widths = dict[Place, int]


class Way(Enum):
    """Who has the first choice of bytes: copies out, copies back, or each as long as its window is the shortest."""

    OUT_FIRST = "out first"
    BACK_FIRST = "back first"
    SHORTEST_FIRST = "shortest first"


def with_windows(
    case: MemoryCase,
    plan: MemoryPlan,
    limit_bytes: int,
    play: Callable[[MemoryPlan], Outcome],
    ways: Sequence[Way] = (Way.OUT_FIRST,),
) -> Outcome:
    """Return a plan its distances and plays it; of several ways the fastest.

    With the first two ways copies out are waited for only where an action would lack bytes, the one posted first before
    the others, and copies back posted as early as the bytes allow, in the order in which they are needed. With the third
    each window grows by one action at a time, the shortest in seconds first. Where the walk finds more than was counted,
    that action gets less room.
    """
    tight = play(set_distances(plan, {}, {}))
    has_copies = any(segment.choice is Choice.OFFLOAD for stage in plan.stages for segment in stage)
    if not has_copies or max(tight.peak_bytes) > limit_bytes:
        return tight
    best = tight
    for way in ways:
        lanes = [lane_of(tight, rank, limit_bytes) for rank in range(len(tight.ranks))]
        for _ in range(TRIALS):
            widths = _even(plan, lanes) if way is Way.SHORTEST_FIRST else _widest(lanes, way is Way.BACK_FIRST)
            found = play(set_distances(plan, *widths))
            if max(found.peak_bytes) <= limit_bytes:
                best = found if found.step_s < best.step_s else best
                break
            for lane, excess in zip(lanes, excess_bytes(found, limit_bytes), strict=True):
                lane.room = [room - over for room, over in zip(lane.room, excess, strict=True)]
    return best


def set_distances(plan: MemoryPlan, free: Widths | None, ahead: Widths | None) -> MemoryPlan:
    """Return a plan with distances for its offloaded segments, 0 where they are not among those given, or as they are."""
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


def _widest(lanes: Sequence[Lane], back_first: bool) -> tuple[Widths, Widths]:
    """Return the distances out and back; a segment's are those of the micro-batch and rank with the least."""
    free: Widths = {}
    ahead: Widths = {}
    for lane in lanes:
        room = list(lane.room)
        first = (_back if back_first else _out)(lane.spans, room, {})
        second = (_out if back_first else _back)(lane.spans, room, first)
        for widths, found in ((free, second if back_first else first), (ahead, first if back_first else second)):
            for index, width in found.items():
                place = lane.spans[index].place
                widths[place] = min(widths.get(place, width), width)
    return free, ahead


def _out(spans: Sequence[Span], room: list[int], ahead: dict[int, int]) -> dict[int, int]:
    """Return each copy's window out in compute actions, and takes its bytes from the room.

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


def _back(spans: Sequence[Span], room: list[int], free: dict[int, int]) -> dict[int, int]:
    """Return each copy's window back: `_out` with time the other way, so what is needed last is posted last."""
    mirrored = room[::-1]
    widths = _out([span.mirrored(len(room)) for span in spans], mirrored, free)
    room[:] = mirrored[::-1]
    return widths


def _even(plan: MemoryPlan, lanes: Sequence[Lane]) -> tuple[Widths, Widths]:
    """Return the distances out and back, grown from none."""
    rooms = [list(lane.room) for lane in lanes]
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
        if _take(lanes, rooms, place, width, is_back):
            widths[place] = width
            length_s = min(_length_s(lane, span, width, is_back) for lane, span in _spans(lanes, place))
            heapq.heappush(queue, (length_s, order, place, is_back))
    return free, ahead


def _spans(lanes: Sequence[Lane], place: Place) -> list[tuple[Lane, Span]]:
    return [(lane, span) for lane in lanes for span in lane.spans if span.place == place]


def _take(lanes: Sequence[Lane], rooms: list[list[int]], place: Place, width: int, is_back: bool) -> bool:
    """Take the bytes of one more action in a window, of every micro-batch, where there are bytes for all."""
    taken: list[tuple[list[int], int, int]] = []
    for lane, room in zip(lanes, rooms, strict=True):
        for _, span in _spans([lane], place):
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


def _length_s(lane: Lane, span: Span, width: int, is_back: bool) -> float:
    if is_back:
        last = max(span.made, span.needed - width)
        return lane.ends[span.needed - 1] - (lane.ends[last - 1] if last else 0.0)
    return lane.ends[min(span.needed - 1, span.made + width)] - lane.ends[span.made]

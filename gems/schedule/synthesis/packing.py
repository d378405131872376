"""The least distance of micro-batches on a rank.

It is computed by packing, under a cap, the sizes that each must hold around its peak.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

ROUNDING = 1e-9
SIZES_PER_UNIT = 10**12
FEWEST_CELLS = 36
MOST_CELLS = 72
# after two cycles of so many distances, a sequence is extrapolated by its growth in one
CYCLE = 6
# a time from the peak, and the size that is held until then
Step = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Peak:
    """The sizes that a micro-batch of one direction must hold on a rank around its peak.

    They hold for any schedule. The peak is the start of its last forward on the rank. Each size of
    `before` is held at least from this time before the peak on, each of `after` at least until this
    time after it; both sum up to `size`. `peak` is the least time from the start of the step to a
    peak, `tail` the time from a peak to the end of the step, and `time` the time of the last
    forward. Micro-batches of a direction are equal, so the n-th start or end of each operation on
    the rank may be attributed to the n-th micro-batch: all distances and the held sizes at any time
    stay the same, and peaks follow each other.
    """

    count: int
    size: float
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    peak: float
    tail: float
    time: float


def distance_by_memory_time(peaks: Sequence[Peak], cap: float) -> float:
    """Return the least time from the first to the last peak on a rank, by memory-time.

    The total memory-time is at most the cap x that time plus the parts before the first peak and
    after the last one. At the first peak, that micro-batch holds its `size` and all others fit into
    the rest of the cap. The memory-time that any of them used before is at most the largest ratio
    of such memory-time to the size that it holds now. The same applies to the last peak.
    """
    total = sum(
        peak.count * (_memory_time(peak.before) + _memory_time(peak.after)) for peak in peaks
    )
    for sides in ([peak.before for peak in peaks], [peak.after for peak in peaks]):
        ratio = max(map(_largest_ratio, sides))
        total -= max(
            _memory_time(steps) + max(0.0, cap - peak.size) * ratio
            for peak, steps in zip(peaks, sides, strict=True)
        )
    return max(0.0, total / cap) if cap else 0.0


def _memory_time(steps: Sequence[Step]) -> float:
    return sum(time * size for time, size in steps)


def _largest_ratio(steps: Sequence[Step]) -> float:
    """Return the largest ratio of the memory-time further from the peak to the size held then.

    The maximum is over all times.
    """
    largest = level = beyond = last = 0.0
    for time, size in [*sorted(steps, reverse=True), (0.0, 0.0)]:
        if level and time < last:
            beyond += level * (last - time)
            largest = max(largest, beyond / level)
        level = level + size
        last = time
    return largest


def distance_by_sequence(peak: Peak, cap: float) -> float:
    """Return the least time between the first and last of equal peaks, by the sizes that fit.

    At the latest start of each of its forwards, the sizes of a micro-batch, of the two before it
    and of the next one fit into the cap together. The shortest sequence of distances with this
    property, by dynamic programming over the last two, is not longer than that of any schedule. It
    is in whole cells of time. If the held sizes are rounded down to cells, the peaks of a schedule
    may be rounded down too, because everything held in a cell is held together at its end.
    """
    span = max(time for time, _ in peak.before) + max(time for time, _ in peak.after)
    if peak.count < 2 or span <= 0.0:
        return 0.0
    times = [time for steps in (peak.before, peak.after) for time, _ in steps]
    num_cells = max(
        range(FEWEST_CELLS, MOST_CELLS + 1),
        key=lambda num: sum(floor(time * num / span + ROUNDING) for time in times) / num,
    )
    cell = span / num_cells
    return _shortest(_next_distances(peak, cap, cell), peak.count - 1) * cell * (1 - 2 * ROUNDING)


def _next_distances(peak: Peak, cap: float, cell: float) -> list[list[int]]:
    """Return, in cells, the least distance to the next peak by the two distances before it.

    From the last index on, micro-batches do not overlap. A value above it means that nothing fits.
    """

    def cells(time: float) -> int:
        return floor(time / cell + ROUNDING)

    def amount(size: float) -> int:
        return floor(size * SIZES_PER_UNIT)

    before = [(cells(time), amount(size)) for time, size in peak.before]
    after = [(cells(time), amount(size)) for time, size in peak.after]

    def level(x: int) -> int:
        """Return the size that is held `x` cells after a peak."""
        return (
            sum(size for back, size in before if back >= -x)
            if x < 0
            else sum(size for on, size in after if on > x)
        )

    # The rank is busy during the last forward: whatever the next one must start before its end, it
    # starts before its begin.
    late = [(cells(time + peak.time) - 1, amount(size)) for time, size in peak.before if time > 0.0]
    first = cells(peak.time)
    most = max(before)[0] + max(after)[0] + first + 1
    room = ceil(cap * (1 + ROUNDING) * SIZES_PER_UNIT) + len(before)
    distances = [[first] * (most + 1) for _ in range(most + 1)]
    total = sum(size for _, size in before)
    for time, coming in [
        (0, late),
        *((time, before) for time in sorted({time for time, _ in before})),
    ]:
        levels = [level(x - time) for x in range(2 * most + 1)]
        own = total if coming is late else sum(size for back, size in before if back >= time)
        needs = [-sum(size for back, size in coming if back >= time + x) for x in range(most + 1)]
        least: dict[int, int] = {}
        for last, row in enumerate(distances):
            room_now = room - own - levels[last]
            for older in range(most + 1):
                free = room_now - levels[last + older]
                distance = least.get(free)
                if distance is None:
                    distance = least[free] = bisect_left(needs, -free) if free >= 0 else most + 1
                if distance > row[older]:
                    row[older] = distance
    return distances


def _shortest(next_distances: list[list[int]], num: int) -> float:
    """Return the least sum of `num` distances; each must satisfy the two distances before it.

    After two cycles, a sum is continued by the least growth of any state in the second one: sums of
    states do not grow less in a later cycle, because they follow from earlier ones by additions and
    minima alone.
    """
    most = len(next_distances) - 1
    first = next_distances[most][most]
    # totals[last][older]: the least sum so far
    totals = [[inf] * most + [float(last) if last >= first else inf] for last in range(most + 1)]
    ends: list[float] = []
    earlier: list[list[float]] = []
    for turn in range(1, 2 * CYCLE + 1):
        ends.append(
            min(
                (
                    total
                    for sums, nexts in zip(totals, next_distances, strict=True)
                    for total, following in zip(sums, nexts, strict=True)
                    if following <= most
                ),
                default=inf,
            )
        )
        if turn == num:
            return ends[-1]
        if turn == CYCLE:
            earlier = totals
        rows = []
        for sums, nexts in zip(totals, next_distances, strict=True):
            best = [inf] * (most + 2)
            for total, following in zip(sums, nexts, strict=True):
                if total < best[following]:
                    best[following] = total
            least = inf
            row = []
            for distance in range(most + 1):
                if best[distance] < least:
                    least = best[distance]
                row.append(least + distance)
            rows.append(row)
        if turn < 2 * CYCLE:
            totals = [list(column) for column in zip(*rows, strict=True)]
    growth = min(
        (
            now - then
            for sums, olds in zip(totals, earlier, strict=True)
            for now, then in zip(sums, olds, strict=True)
            if then < inf
        ),
        default=inf,
    )
    cycles = -((2 * CYCLE - num) // CYCLE)
    return ends[num - cycles * CYCLE - 1] + cycles * growth

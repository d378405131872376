"""Bounds of capped schedules.

They are lower bounds of the time of a step that hold for every order of its actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, inf

from gems.schedule.bounds import Saving, least_time, most_in, saving
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.synthesis.packing import Peak, distance_by_memory_time, distance_by_sequence

CAP_SLACK = 2e-9  # excess that a simulation accepts
ROUNDING = 1e-9  # relative error of sizes
SUMMING = 1e-10  # relative error of times
# up to this number of micro-batches under the cap, sequences of peaks are examined
FEW = 3.0


def span_bound(
    costs: StageCosts,
    placement: Placement,
    counts: Sequence[int],
    cap: float | None,
    network: Network = FREE,
    allow: Sequence[str] = (),
) -> float:
    """Return a lower bound of the time of a step with `counts` micro-batches in each direction.

    It is the maximum of several bounds on each rank: `rough_span` and, if activations stay on the
    device, the work with fill and drain under the cap, and the path to its first peak plus the
    distance of its peaks plus the path from the last one. Times are real numbers like those of a
    simulation, so no schedule undercuts the bound by rounding.
    """
    longest = rough_span(costs, placement, counts, cap, network, allow)
    if cap is None or allow:
        return longest
    directions = active_directions(costs, placement, counts, network)
    tightest: tuple[float, list[Peak], float] | None = None
    for rank in range(placement.num_ranks):
        here = [
            (direction, stages) for direction in directions if (stages := direction.stages[rank])
        ]
        if not here:
            continue
        room = _room(costs, sorted({stage for _, stages in here for stage in stages}), cap)
        peaks = [_peak(costs, direction, stages) for direction, stages in here]
        span = _span(peaks, distance_by_memory_time(peaks, room))
        longest = max(longest, span, _fill_and_drain(costs, here, room))
        if tightest is None or span > tightest[0]:
            tightest = span, peaks, room
    if tightest is not None and len(tightest[1]) == 1:
        _, peaks, room = tightest
        if room < FEW * peaks[0].size:
            longest = max(longest, _span(peaks, distance_by_sequence(peaks[0], room)))
    return longest * (1 - SUMMING)


def rough_span(
    costs: StageCosts,
    placement: Placement,
    counts: Sequence[int],
    cap: float | None,
    network: Network = FREE,
    allow: Sequence[str] = (),
) -> float:
    """Return a lower bound of the time of a step from work, chain and memory-time alone.

    It is the maximum of several bounds on each rank, with heads and tails of the chain: its work,
    its forwards and input gradients with the path back to stage 0, and the memory-time of what it
    holds (size x shortest lifetime, over cap x time; the bound of the controllable-memory
    schedules, Qi et al. 2024). Memory actions save memory-time as in `least_time`; recomputation
    and copies are considered independently, so the bound holds but may not be attained.
    """
    directions = active_directions(costs, placement, counts, network)
    longest = min(direction.ends[-1] for direction in directions) + costs.weight_grad[0]
    for rank in range(placement.num_ranks):
        work = chain = memory_time = 0.0
        heads = []
        tails = []
        savings: dict[str, list[Saving]] = {"recompute": [], "offload": []}
        for direction in directions:
            stages = direction.stages[rank]
            if stages:
                heads.append(direction.start(stages[0]))
                tails.append(direction.ends[-1] - direction.back(stages[0]) + costs.weight_grad[0])
            for stage in stages:
                chain += direction.count * (costs.forward[stage] + costs.input_grad[stage])
                work += direction.count * costs.weight_grad[stage]
                life = direction.back(stage) - direction.start(stage)
                product = (
                    costs.activation[stage] * life
                    + costs.held_for_weights[stage] * costs.weight_grad[stage]
                )
                memory_time += direction.count * product
                for name in allow:
                    saved, paid = saving(costs, stage, life - costs.input_grad[stage], name)
                    if saved > 0:
                        savings[name].append((direction.count * saved, direction.count * paid))
        if heads:
            work = work + chain
            head = min(heads)
            by_memory = (
                work if cap is None else least_time(work, memory_time, cap + CAP_SLACK, **savings)
            )
            longest = max(longest, head + chain + min(tails), head + by_memory)
    return longest * (1 - SUMMING)


@dataclass(frozen=True, slots=True)
class Direction:
    """The micro-batches of one direction.

    `ends` are the least times from their start to the end of each operation. Operations are the
    forwards of stages 0 to S - 1, then the input gradients of stages S - 1 to 0. `stages` are the
    stages of each rank, lowest first.
    """

    count: int
    costs: StageCosts
    stages: list[list[int]]
    ends: tuple[float, ...]

    def start(self, stage: int) -> float:
        """Return the least time to the start of a stage's forward."""
        return self.ends[stage] - self.costs.forward[stage]

    def back(self, stage: int) -> float:
        """Return the least time to the end of a stage's input gradient."""
        return self.ends[-1 - stage]


def active_directions(
    costs: StageCosts, placement: Placement, counts: Sequence[int], network: Network
) -> list[Direction]:
    """Return the directions in which micro-batches run."""
    directions = []
    for count, ranks in zip(counts, placement.ranks, strict=True):
        flights = network.hops(ranks, costs.boundary_bytes)
        times = (*costs.forward, *costs.input_grad[::-1])
        ends = accumulate(map(sum, zip(times, (0.0, *flights, 0.0, *flights[::-1]), strict=True)))
        stages: list[list[int]] = [[] for _ in range(placement.num_ranks)]
        for stage, rank in enumerate(ranks):
            stages[rank].append(stage)
        if count:
            directions.append(Direction(count, costs, stages, tuple(ends)))
    return directions


def _room(costs: StageCosts, stages: Sequence[int], cap: float) -> float:
    """Return the part of the cap that a rank can use.

    If all its sizes are multiples of the smallest one, it is a whole number of activations.
    """
    sizes = [
        size
        for stage in stages
        for size in (costs.activation[stage], costs.held_for_weights[stage])
        if size
    ]
    room = cap * (1 + ROUNDING) + CAP_SLACK
    unit = min(sizes, default=0.0)
    if unit and all(abs(size / unit - round(size / unit)) <= ROUNDING for size in sizes):
        room = min(room, floor(room / unit) * unit * (1 + ROUNDING))
    return room


def _peak(costs: StageCosts, direction: Direction, stages: Sequence[int]) -> Peak:
    """Return what a micro-batch must hold on a rank around the start of its last forward there."""
    top = direction.start(stages[-1])
    after = []
    for stage in stages:
        rest = costs.held_for_weights[stage]
        end = direction.back(stage) - top
        after += [(end, costs.activation[stage] - rest), (end + costs.weight_grad[stage], rest)]
    return Peak(
        count=direction.count,
        size=sum(costs.activation[stage] for stage in stages),
        before=tuple((top - direction.start(stage), costs.activation[stage]) for stage in stages),
        after=tuple(after),
        peak=top,
        tail=direction.ends[-1] + costs.weight_grad[0] - top,
        time=costs.forward[stages[-1]],
    )


def _span(peaks: Sequence[Peak], distance: float) -> float:
    return min(peak.peak for peak in peaks) + distance + min(peak.tail for peak in peaks)


def _fill_and_drain(
    costs: StageCosts, here: Sequence[tuple[Direction, list[int]]], room: float
) -> float:
    """Return a rank's work plus its least idle time at both ends of the step.

    The ends are before its first input gradient and after its last forward. Before the first input
    gradient it runs only forwards, whose activations fit into the cap together, so in that time it
    works at most as long as these take. After the last forward it works off the activations that it
    holds under the cap. If not all activations fit at once, some are freed before the last forward,
    so the two stretches are disjoint and both count.
    """
    work = total = 0.0
    ahead: list[Saving] = []
    behind: list[Saving] = []
    for direction, stages in here:
        for stage in stages:
            size = costs.activation[stage]
            rest = costs.held_for_weights[stage]
            weight_grad = costs.weight_grad[stage]
            forward = costs.forward[stage]
            backward = costs.input_grad[stage] + weight_grad
            work += direction.count * (forward + backward)
            total += direction.count * size
            ahead.append((forward * direction.count, size * direction.count))
            # relative to its size, the more productive of the whole backward and the weight
            # gradient alone
            least = min(size, rest * backward / weight_grad if weight_grad else inf)
            behind.append((backward * direction.count, least * direction.count))
    if total <= room:
        return work
    first = min(
        direction.back(stages[-1]) - costs.input_grad[stages[-1]] for direction, stages in here
    )
    head = min(direction.start(stages[0]) for direction, stages in here)
    last = min(
        direction.ends[-1] + costs.weight_grad[0] - direction.ends[stages[-1]]
        for direction, stages in here
    )
    return work + max(head, first - most_in(ahead, room)) + max(0.0, last - most_in(behind, room))

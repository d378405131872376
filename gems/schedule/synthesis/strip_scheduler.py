"""The finite schedule of strips.

Each rank starts, of what may run, the first by a fixed order of kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from gems.schedule.action import Action, Kind
from gems.schedule.costs import Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.registry import CAPPED
from gems.schedule.schedule import Schedule
from gems.schedule.strips import strip_costs
from gems.schedule.synthesis.bound import CAP_SLACK, ROUNDING, SUMMING, rough_span
from gems.schedule.synthesis.problem import Problem
from gems.schedule.synthesis.templates import Budget

Key = tuple[int, int]  # direction and stage
_F = Kind.F
_I = Kind.I
_W = Kind.W
STEPS_PER_OPERATION = 2  # of a budget
ORDERS = ((_I, _F, _W), (_F, _I, _W), (_I, _W, _F))
VANISHING = 2**40  # strips of a strip, which then takes no time


class StripScheduler:
    """Runs a step forward in time under the cap of a problem whose micro-batches are strips.

    Of the strips that may run a rank takes the first kind in `order`, of that the earliest
    micro-batch, and of that the last stage. Room is given so that every micro-batch that has
    started can hold all of its strips, in the order of their starts (the banker's algorithm), for
    none is freed before the last one has been through all stages. `span` is in ticks.
    """

    def __init__(self, problem: Problem, num_strips: int, order: Sequence[Kind]) -> None:
        self.problem = problem
        self.num_strips = num_strips
        self.order = order
        ranks = range(problem.num_ranks)
        self.keys: list[list[Key]] = [
            [
                (way, stage)
                for way in range(problem.num_directions)
                for stage in problem.stages_of(rank, way)
            ]
            for rank in ranks
        ]
        keys = [key for of_rank in self.keys for key in of_rank]
        # a gradient may need more beside it than forward kept, for which there must be room
        self.size = [max(both) for both in zip(problem.size, problem.held, strict=True)]
        self.started: dict[Kind, dict[Key, int]] = {
            kind: dict.fromkeys(keys, 0) for kind in (_F, _I, _W)
        }
        # when the data of the next strips is there, in the order in which they run
        self.arrivals: dict[Kind, dict[Key, list[int]]] = {
            kind: {key: [] for key in keys} for kind in (_F, _I)
        }
        self.free, self.used, self.oldest = ([0] * problem.num_ranks for _ in range(3))
        num_whole = problem.num_micro_batches // num_strips
        self.held = [[0] * num_whole for _ in ranks]
        self.left = [
            [
                sum(way == m % problem.num_directions for way, _ in self.keys[r]) * num_strips
                for m in range(num_whole)
            ]
            for r in ranks
        ]
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.events: list[tuple[int, int]] = []
        self.span = 0
        for way in range(problem.num_directions):
            self.arrivals[_F][way, 0] = [0] * (
                len(range(way, num_whole, problem.num_directions)) * num_strips
            )
            heappush(self.events, (0, problem.rank[way][0]))
        events = self.events
        free = self.free
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                self.decide(now, rank)

    def schedule(self) -> Schedule:
        """Return the rows as a schedule."""
        problem = self.problem
        rows = tuple(map(tuple, self.rows))
        return Schedule(
            CAPPED, problem.num_micro_batches, problem.placement, rows, num_strips=self.num_strips
        )

    def whole(self, key: Key, count: int) -> int:
        """Return the micro-batch of the strip that is run after `count` others."""
        return key[0] + count // self.num_strips * self.problem.num_directions

    def decide(self, now: int, rank: int) -> None:
        """Start the next operation of an idle rank, if any may run; what arrives later asks again."""
        for kind in self.order:
            found: tuple[int, int, Key] | None = None
            for key in self.keys[rank]:
                count = self.started[kind][key]
                if not self.is_ready(kind, key, count, now):
                    continue
                m = self.whole(key, count)
                if (found is None or (m, -key[1]) < found[:2]) and (
                    kind is not _F or self.has_room(rank, m, key[1])
                ):
                    found = m, -key[1], key
            if found is not None:
                self.start(now, rank, kind, found[2], found[0])
                return

    def is_ready(self, kind: Kind, key: Key, count: int, now: int) -> bool:
        """Return whether the data of a stage's next strip is there."""
        if kind is _W:
            return count < self.started[_I][key]
        arrivals = self.arrivals[kind][key]
        return count < len(arrivals) and arrivals[count] <= now

    def has_room(self, rank: int, m: int, stage: int) -> bool:
        """Return whether a forward leaves room for all micro-batches that came before it, and the rest of its own."""
        room = self.problem.cap - self.used[rank] - self.size[stage]
        if room < 0:
            return False
        for older in range(self.oldest[rank], m):
            if self.claim(rank, older) > room:
                return False
            room += self.held[rank][older]
        return self.claim(rank, m) - self.size[stage] <= room

    def claim(self, rank: int, m: int) -> int:
        """Return the sizes that a rank has yet to take for a micro-batch."""
        num = self.num_strips
        ways = self.problem.num_directions
        way = m % ways
        end = (m // ways + 1) * num
        counts = self.started[_F]
        return sum(
            self.size[key[1]] * min(num, max(0, end - counts[key]))
            for key in self.keys[rank]
            if key[0] == way
        )

    def start(self, now: int, rank: int, kind: Kind, key: Key, m: int) -> None:
        """Start an operation, and hand on what it makes when it ends."""
        problem = self.problem
        num = self.num_strips
        (way, stage), last = key, problem.num_stages - 1
        count = self.started[kind][key]
        self.started[kind][key] += 1
        strip = count % num if kind is _F else num - 1 - count % num
        self.rows[rank].append(Action(kind, stage, m * num + strip, way))
        if kind is _F:
            end = now + problem.time[way][stage]
            self.take(rank, m, self.size[stage])
            if stage < last:
                self.arrive(_F, (way, stage + 1), end + problem.lag[way][stage + 1])
            elif strip == num - 1:
                self.arrive(_I, key, end)
        elif kind is _I:
            operation = 2 * last + 1 - stage
            end = now + problem.time[way][operation]
            self.take(rank, m, problem.held[stage] - self.size[stage])
            if stage:
                self.arrive(_I, (way, stage - 1), end + problem.lag[way][operation + 1])
            if stage == last and strip:
                self.arrive(_I, key, end)
        else:
            end = now + problem.weight_grad[stage]
            self.take(rank, m, -problem.held[stage])
            left = self.left[rank]
            oldest = self.oldest[rank]
            left[m] -= 1
            while oldest < len(left) and not left[oldest]:
                oldest += 1
            self.oldest[rank] = oldest
        self.free[rank] = end
        self.span = max(self.span, end)
        heappush(self.events, (end, rank))

    def arrive(self, kind: Kind, key: Key, at: int) -> None:
        """Hand a strip to a stage."""
        self.arrivals[kind][key].append(at)
        heappush(self.events, (at, self.problem.rank[key[0]][key[1]]))

    def take(self, rank: int, m: int, size: int) -> None:
        """Count what an operation allocates, or frees if `size` is negative."""
        self.used[rank] += size
        self.held[rank][m] += size


def strip_schedules(
    problems: Sequence[Problem], num_strips: int, budget: Budget
) -> list[StripScheduler]:
    """Return the steps of all placements and orders that the budget allows, one at least, the shortest first."""
    found: list[StripScheduler] = []
    for order in ORDERS:
        for problem in problems:
            if budget.spend(STEPS_PER_OPERATION * problem.num_steps) or not found:
                found.append(StripScheduler(problem, num_strips, order))
    return sorted(found, key=lambda run: run.span / run.problem.ticks_per_unit)


def least_strip_room(problem: Problem, num_strips: int) -> int:
    """Return the least cap under which a micro-batch can pass.

    All of its strips are held at the turn.
    """
    sizes = [max(both) for both in zip(problem.size, problem.held, strict=True)]
    return num_strips * max(
        sum(sizes[stage] for stage in problem.stages_of(rank, way))
        for rank in range(problem.num_ranks)
        for way in range(problem.num_directions)
    )


def strips_span_bound(
    costs: StageCosts,
    placement: Placement,
    num: int,
    num_strips: int,
    cap: float | None,
    network: Network,
) -> float:
    """Return a time that no step of `num` strips, `num_strips` to a micro-batch, is shorter than in one direction.

    When the last strip of a micro-batch starts its last forward on a rank, the rank holds all of
    it. Until the first gradient comes back it works only on what the rest of the cap holds: strips
    that came before go on to their weight gradients, and as many later ones run forward. The rest
    of that time it idles, once for each micro-batch, if the cap is below two of them.
    """
    if placement.num_directions > 1 or cap is None:
        return 0.0
    ranks = placement.ranks[0]
    longest = 0.0
    back = (
        [0.0] * costs.num_stages
    )  # from the end of a stage's forward of the last strip to its first gradient
    for stage in reversed(range(costs.num_stages - 1)):
        here = ranks[stage]
        there = ranks[stage + 1]
        size = costs.boundary_bytes[stage]
        hops = (
            0.0
            if here == there
            else network.delay(here, there, size) + network.delay(there, here, size)
        )
        back[stage] = (
            back[stage + 1] + hops + costs.forward[stage + 1] + costs.input_grad[stage + 1]
        )
    for rank in range(placement.num_ranks):
        stages = [stage for _, stage in placement.stages_on(rank)]
        held = num_strips * sum(costs.activation[stage] for stage in stages)
        room = cap * (1 + ROUNDING) + CAP_SLACK - held
        work = sum(costs.forward[s] + costs.input_grad[s] + costs.weight_grad[s] for s in stages)
        # what a size of activations lets do: its whole backward if it came before, a forward if it
        # comes after
        rates = [
            (costs.forward[s] + costs.input_grad[s] + costs.weight_grad[s]) / min(sizes)
            for s in stages
            if min(sizes := (costs.activation[s], costs.held_for_weights[s])) > 0
        ]
        idle = 0.0
        if len(rates) == len(stages) and 0 <= room < held:
            idle = max(0.0, back[stages[-1]] - room * max(rates))
        longest = max(longest, num * work + num // num_strips * idle)
    return longest * (1 - SUMMING)


def any_strips_span_bound(
    costs: StageCosts,
    placement: Placement,
    counts: Sequence[int],
    num_strips: int,
    cap: float | None,
    network: Network,
) -> float:
    """Return a time that no step is shorter than, in whatever number of strips.

    Costs and counts are those of strips, `num_strips` to a micro-batch; the latency of the network
    is what a message takes however small it is. More strips shorten the way of each through the
    stages and nothing else, so what holds of ranks in strips that take no time holds of any. Beside
    their work there is the way of one micro-batch, whose gradients wait for its last strip.
    """
    small = strip_costs(costs, VANISHING)
    many = [count * VANISHING for count in counts]
    passes = [
        _pass(costs, placement, way, num_strips, network)
        for way, count in enumerate(counts)
        if count
    ]
    return max(
        min(passes) * (1 - SUMMING),
        rough_span(small, placement, many, cap, network),
        strips_span_bound(small, placement, sum(many), num_strips * VANISHING, cap, network),
    )


def _pass(
    costs: StageCosts, placement: Placement, way: int, num_strips: int, network: Network
) -> float:
    """Return the least time in which one micro-batch goes through the stages, and then its gradients back.

    Each of the two takes on every rank the way there, what the rank does, and the way on.
    """
    ranks = placement.ranks[way]
    hops = [pair if pair[0] != pair[1] else None for pair in pairwise(ranks)]
    there = [0.0, *accumulate(0.0 if hop is None else network.delay(*hop, 0.0) for hop in hops)]
    back = [
        0.0,
        *accumulate(0.0 if hop is None else network.delay(*hop[::-1], 0.0) for hop in hops),
    ]
    forward = backward = 0.0
    for rank in set(ranks):
        stages = [stage for stage, on in enumerate(ranks) if on == rank]
        first = stages[0]
        last = stages[-1]
        forwards = num_strips * sum(costs.forward[stage] for stage in stages)
        gradients = num_strips * sum(costs.input_grad[stage] for stage in stages)
        forward = max(forward, there[first] + forwards + there[-1] - there[last])
        backward = max(backward, back[-1] - back[last] + gradients + back[first])
    return forward + backward

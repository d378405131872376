"""The finite schedule of strips.

Each rank starts the first runnable operation by a fixed order of kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from gems.schedule.action import Action, Kind
from gems.schedule.costs import Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.registry import CAPPED
from gems.schedule.schedule import Schedule
from gems.schedule.strips import strip_costs
from gems.schedule.synthesis.bound import (
    CAP_SLACK,
    ROUNDING,
    SUMMING,
    active_directions,
    rough_span,
)
from gems.schedule.synthesis.problem import Problem
from gems.schedule.synthesis.templates import Budget

Key = tuple[int, int]  # direction and stage
_F = Kind.F
_I = Kind.I
_W = Kind.W
STEPS_PER_OPERATION = 2  # of a budget
# the order of kinds, and the kinds that run first come, first served
Rule = tuple[tuple[Kind, ...], tuple[Kind, ...]]
QUEUES: tuple[Rule, ...] = (
    ((_I, _F, _W), (_F, _I)),
    ((_I, _W, _F), (_I,)),
    ((_F, _I, _W), (_F, _I)),
)
DEPTH_FIRST: tuple[Rule, ...] = (((_I, _F, _W), ()), ((_F, _I, _W), ()), ((_I, _W, _F), ()))
SLACK = 1e-9  # share of a step that rounding may account for
# strips per strip, each of which then takes no time
VANISHING = 2**40


class StripScheduler:
    """A simulation of a step under the cap of a problem whose micro-batches are strips.

    Of the strips that may run, a rank takes the first kind in the order of `rule`; then the
    earliest micro-batch; then the first to arrive, if the rule says so; then the last stage. Room
    is granted so that every micro-batch that has started can hold all of its strips, in the order
    of their starts (the banker's algorithm), because none is freed before the last one has passed
    all stages. `span` is in ticks; it is infinite, and the run ends early, if it would reach
    `limit`.
    """

    def __init__(self, problem: Problem, num_strips: int, rule: Rule, limit: float = inf) -> None:
        self.problem = problem
        self.num_strips = num_strips
        self.limit = limit
        self.order, self.queued = rule
        ranks = range(problem.num_ranks)
        self.keys: list[list[Key]] = [
            [
                (direction, stage)
                for direction in range(problem.num_directions)
                for stage in problem.rank_stages(rank, direction)
            ]
            for rank in ranks
        ]
        keys = [key for of_rank in self.keys for key in of_rank]
        # a gradient may need more memory than forward kept, so there must be room for it
        self.size = [max(both) for both in zip(problem.size, problem.held, strict=True)]
        self.started: dict[Kind, dict[Key, int]] = {
            kind: dict.fromkeys(keys, 0) for kind in (_F, _I, _W)
        }
        # when the data of the next strips are available, in the order in which they run
        self.arrivals: dict[Kind, dict[Key, list[int]]] = {
            kind: {key: [] for key in keys} for kind in (_F, _I)
        }
        self.free, self.used, self.oldest = ([0] * problem.num_ranks for _ in range(3))
        self.work = [
            sum(
                problem.num_in(direction) * problem.stage_work(stage)
                for direction, stage in self.keys[rank]
            )
            for rank in ranks
        ]
        num_whole = problem.num_micro_batches // num_strips
        self.held = [[0] * num_whole for _ in ranks]
        self.left = [
            [
                sum(direction == m % problem.num_directions for direction, _ in self.keys[r])
                * num_strips
                for m in range(num_whole)
            ]
            for r in ranks
        ]
        self.rank_schedules: list[list[Action]] = [[] for _ in ranks]
        self.events: list[tuple[int, int]] = []
        self.span = 0.0
        for direction in range(problem.num_directions):
            self.arrivals[_F][direction, 0] = [0] * (
                len(range(direction, num_whole, problem.num_directions)) * num_strips
            )
            heappush(self.events, (0, problem.rank[direction][0]))
        events = self.events
        free = self.free
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                self.decide(now, rank)

    def schedule(self) -> Schedule:
        """Return the actions as a schedule."""
        problem = self.problem
        rank_schedules = tuple(map(tuple, self.rank_schedules))
        return Schedule(
            CAPPED,
            problem.num_micro_batches,
            problem.placement,
            rank_schedules,
            num_strips=self.num_strips,
        )

    def whole(self, key: Key, count: int) -> int:
        """Return the micro-batch of the strip that runs after `count` others."""
        return key[0] + count // self.num_strips * self.problem.num_directions

    def decide(self, now: int, rank: int) -> None:
        """Start the next operation of an idle rank, if any may run; later arrivals retry."""
        for kind in self.order:
            first: tuple[int, int, int, Key] | None = None
            is_queued = kind in self.queued
            for key in self.keys[rank]:
                count = self.started[kind][key]
                if not self.is_ready(kind, key, count, now):
                    continue
                m = self.whole(key, count)
                came = self.arrivals[kind][key][count] if is_queued else 0
                if (first is None or (m, came, -key[1]) < first[:3]) and (
                    kind is not _F or self.has_room(rank, m, key[1])
                ):
                    first = m, came, -key[1], key
            if first is not None:
                self.start(now, rank, kind, first[3], first[0])
                return

    def is_ready(self, kind: Kind, key: Key, count: int, now: int) -> bool:
        """Return whether the data of a stage's next strip are available."""
        if kind is _W:
            return count < self.started[_I][key]
        arrivals = self.arrivals[kind][key]
        return count < len(arrivals) and arrivals[count] <= now

    def has_room(self, rank: int, m: int, stage: int) -> bool:
        """Return whether a forward leaves room for earlier micro-batches and its own rest."""
        room = self.problem.cap - self.used[rank] - self.size[stage]
        if room < 0:
            return False
        for older in range(self.oldest[rank], m):
            if self.claim(rank, older) > room:
                return False
            room += self.held[rank][older]
        return self.claim(rank, m) - self.size[stage] <= room

    def claim(self, rank: int, m: int) -> int:
        """Return the sizes that a rank still has to allocate for a micro-batch."""
        num = self.num_strips
        directions = self.problem.num_directions
        direction = m % directions
        end = (m // directions + 1) * num
        counts = self.started[_F]
        return sum(
            self.size[key[1]] * min(num, max(0, end - counts[key]))
            for key in self.keys[rank]
            if key[0] == direction
        )

    def start(self, now: int, rank: int, kind: Kind, key: Key, m: int) -> None:
        """Start an operation, and pass on its result when it ends."""
        problem = self.problem
        num = self.num_strips
        if now + self.work[rank] >= self.limit:
            self.span = inf
            self.events.clear()
            return
        (direction, stage), last = key, problem.num_stages - 1
        count = self.started[kind][key]
        self.started[kind][key] += 1
        strip = count % num if kind is _F else num - 1 - count % num
        self.rank_schedules[rank].append(Action(kind, stage, m * num + strip, direction))
        if kind is _F:
            end = now + problem.time[stage]
            self.take(rank, m, self.size[stage])
            if stage < last:
                self.arrive(_F, (direction, stage + 1), end + problem.lag[direction][stage + 1])
            elif strip == num - 1:
                self.arrive(_I, key, end)
        elif kind is _I:
            operation = 2 * last + 1 - stage
            end = now + problem.time[operation]
            self.take(rank, m, problem.held[stage] - self.size[stage])
            if stage:
                self.arrive(_I, (direction, stage - 1), end + problem.lag[direction][operation + 1])
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
        self.work[rank] -= end - now
        self.free[rank] = end
        self.span = max(self.span, end)
        heappush(self.events, (end, rank))

    def arrive(self, kind: Kind, key: Key, at: int) -> None:
        """Hand a strip to a stage."""
        self.arrivals[kind][key].append(at)
        heappush(self.events, (at, self.problem.rank[key[0]][key[1]]))

    def take(self, rank: int, m: int, size: int) -> None:
        """Count the size that an operation allocates, or frees if `size` is negative."""
        self.used[rank] += size
        self.held[rank][m] += size


def strip_schedules(
    problems: Sequence[Problem],
    num_strips: int,
    budget: Budget,
    num_best: int,
    limit: float,
    shortest: Sequence[float],
) -> tuple[int, list[StripScheduler]]:
    """Return how many schedules the budget allows, and the best ones below `limit`, in order.

    At least one is tried. `shortest` has a lower bound of the time for each problem. So most
    schedules are skipped, or end early: those that cannot be among the `num_best`.
    """
    tried: list[tuple[int, float, Rule, Problem]] = []
    # each kind of rules has the whole budget, because few runs go to their end
    for rules in (QUEUES, DEPTH_FIRST):
        own = Budget(budget.left)
        start = len(tried)
        for number, rule in enumerate(rules, start):
            for problem, least in zip(problems, shortest, strict=True):
                if own.spend(STEPS_PER_OPERATION * problem.num_steps) or not tried:
                    tried.append((number, least, rule, problem))
    best: list[StripScheduler] = []
    for _, least, rule, problem in sorted(tried, key=lambda attempt: attempt[:2]):
        if least < limit * (1 - SLACK):
            run = StripScheduler(problem, num_strips, rule, limit * problem.ticks_per_unit)
            best = sorted([*best, run], key=_span)[:num_best] if run.span < inf else best
            limit = min(limit, _span(best[-1])) if len(best) == num_best else limit
    return len(tried), best


def _span(run: StripScheduler) -> float:
    return run.span / run.problem.ticks_per_unit


def least_strip_room(problem: Problem, num_strips: int) -> int:
    """Return the least cap under which a micro-batch can pass.

    All of its strips are held at the turn.
    """
    sizes = [max(both) for both in zip(problem.size, problem.held, strict=True)]
    return num_strips * max(
        sum(sizes[stage] for stage in problem.rank_stages(rank, direction))
        for rank in range(problem.num_ranks)
        for direction in range(problem.num_directions)
    )


def strips_span_bound(
    costs: StageCosts,
    placement: Placement,
    counts: Sequence[int],
    num_strips: int,
    cap: float | None,
    network: Network,
) -> float:
    """Return a lower bound of the time of a step with `counts` strips in each direction.

    There are `num_strips` strips per micro-batch. When the last strip of a micro-batch starts its
    last forward on a rank, the rank holds all of the micro-batch. Until the first gradient comes
    back, it works only on what fits into the rest of the cap: earlier strips continue to their
    weight gradients, and later ones run forward. The rest of that time it idles, once for each
    micro-batch if no two of them fit under the cap, and it also idles until the first strip
    arrives.
    """
    if cap is None:
        return 0.0
    longest = 0.0
    directions = active_directions(costs, placement, counts, network)
    for rank in range(placement.num_ranks):
        here = [(direction, direction.stages[rank]) for direction in directions]
        sizes = [num_strips * sum(costs.activation[s] for s in stages) for _, stages in here]
        room = [cap * (1 + ROUNDING) + CAP_SLACK - rest for rest in sizes]
        work = {
            s: costs.forward[s] + costs.input_grad[s] + costs.weight_grad[s]
            for _, stages in here
            for s in stages
        }
        # time per size of activations: the whole backward of an earlier strip, or the forward of a
        # later one
        rate = max(
            work[s] / size if size > 0 else inf
            for s in work
            for size in (min(costs.activation[s], costs.held_for_weights[s]),)
        )
        is_alone = rate < inf and all(0 <= rest < min(sizes) for rest in room)
        span = 0.0
        for (direction, stages), free in zip(here, room, strict=True):
            last = stages[-1]
            away = direction.back(last) - costs.input_grad[last] - direction.ends[last]
            idle = max(0.0, away - free * rate) if is_alone else 0.0
            span += (
                direction.count * sum(work[s] for s in stages)
                + direction.count // num_strips * idle
            )
        longest = max(longest, span + min(direction.start(stages[0]) for direction, stages in here))
    return longest * (1 - SUMMING)


def any_strips_span_bound(
    costs: StageCosts,
    placement: Placement,
    counts: Sequence[int],
    num_strips: int,
    cap: float | None,
    network: Network,
) -> float:
    """Return a lower bound of the time of a step for any number of strips.

    Costs and counts are those of strips, `num_strips` per micro-batch; the latency of the network
    is the time of a message of any size. More strips only shorten the path of each strip through
    the stages, so a bound for ranks with strips that take no time holds for any number. In addition
    to their work, there is the path of one micro-batch, whose gradients wait for its last strip.
    """
    small = strip_costs(costs, VANISHING)
    many = [count * VANISHING for count in counts]
    passes = [
        _pass(costs, placement, direction, num_strips, network)
        for direction, count in enumerate(counts)
        if count
    ]
    return max(
        min(passes) * (1 - SUMMING),
        rough_span(small, placement, many, cap, network),
        strips_span_bound(small, placement, many, num_strips * VANISHING, cap, network),
    )


def _pass(
    costs: StageCosts, placement: Placement, direction: int, num_strips: int, network: Network
) -> float:
    """Return the least time in which one micro-batch passes the stages, and its gradients return.

    On every rank, each of the two takes the path to the rank, the work of the rank, and the path
    onwards.
    """
    ranks = placement.ranks[direction]
    reach = [0.0, *accumulate(network.hops(ranks, (0.0,) * len(ranks)))]
    forward = backward = 0.0
    for rank in set(ranks):
        stages = [stage for stage, on in enumerate(ranks) if on == rank]
        first = stages[0]
        last = stages[-1]
        forwards = num_strips * sum(costs.forward[stage] for stage in stages)
        gradients = num_strips * sum(costs.input_grad[stage] for stage in stages)
        forward = max(forward, reach[first] + forwards + reach[-1] - reach[last])
        backward = max(backward, reach[-1] - reach[last] + gradients + reach[first])
    return forward + backward

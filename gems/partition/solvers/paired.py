"""Stages in pairs: GEMS's two directions or a V. The partition of the least highest cost of a pair."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gems.partition.even import even
from gems.partition.problem import Problem, Solution
from gems.partition.solvers.tables import Low, minorant
from gems.profile.spans import RankCosts, Table

CHUNK = 1_000_000
NARROW = 6  # states kept of one left boundary in a search that only looks for a good partition
FIRST_STEP, STEP_GROWTH = 2e-4, 3.0
RESOLUTION = 1e-4
SMALL = 40  # layers up to which all states are cheaper than a search for the threshold


def partition_pairs(
    problem: Problem, deadline: float, start: Sequence[int] | None = None, enough: float = -np.inf
) -> Solution:
    """Return the partition whose dearest pair costs least, exact for any tables unless the deadline comes first.

    States are the places of the left and the right boundary, from outside to inside. A frontier of what can still be
    completed, by minorants of the tables, gives a first bound and leaves a thin band of states; within it the dynamic
    program reads the true tables. It is run at rising thresholds: one at which nothing is found is a bound, and what
    is found at another is the least there is. `deadline` is a time.perf_counter(); `start` a partition that keeps the
    limits; at a cost of `enough` the search ends.
    """
    pairs = Pairs(problem)
    best = tuple(start or even(problem.num_layers, problem.num_stages))
    now = time.perf_counter()
    best = improve(problem, best, now + (deadline - now) / 5)
    cost = problem.cost(best)
    low, most = (pairs.lowest, cost) if problem.num_layers <= SMALL else _bracket(pairs, cost, deadline)
    if most == np.inf and low == np.inf:
        return Solution(None, np.inf, np.inf, True)
    step = FIRST_STEP
    try:
        while cost > enough:
            most = min(most, cost)
            frontier = pairs.completable(most)
            if frontier is not None:
                for width in (NARROW, None):
                    found = _Search(pairs, frontier, min(most, cost), deadline, width).run()
                    if found is not None and problem.cost(found) < cost:
                        best, cost = found, problem.cost(found)
                if cost == np.inf == most:
                    return Solution(None, np.inf, np.inf, True)
                if cost <= most:
                    fewest = _with_fewest_bytes(pairs, problem, cost, deadline)
                    return Solution(fewest or best, cost, cost, True, fewest is not None)
            low, most = most, most * (1 + step) if most > 0 else np.inf
            step *= STEP_GROWTH
            if time.perf_counter() > deadline:
                break
    except TimeoutError:
        pass
    return Solution(best if cost < np.inf else None, cost, low, False)


def _bracket(pairs: Pairs, cost: float, deadline: float) -> tuple[float, float]:
    """Return a lower bound of every partition's cost, and a cost at which the minorants allow a partition."""
    low, high = pairs.lowest, cost
    if high == np.inf:
        if pairs.completable(np.inf) is None:
            return np.inf, np.inf
        high = max(low, 1.0)
        while pairs.completable(high) is None:
            low, high = high, high * 4
    elif pairs.completable(low) is not None:
        high = low
    while high - low > RESOLUTION * abs(high) and time.perf_counter() < deadline:
        middle = (low + high) / 2
        if pairs.completable(middle) is None:
            low = middle
        else:
            high = middle
    return low, high


def _with_fewest_bytes(pairs: Pairs, problem: Problem, cost: float, deadline: float) -> tuple[int, ...] | None:
    frontier = pairs.completable(cost)
    assert frontier is not None
    try:
        return _Search(pairs, frontier, cost, deadline, None, problem.boundary_bytes).run()
    except TimeoutError:
        return None


@dataclass(slots=True)
class _States:
    """What is reached at one depth: places of the two boundaries, the value, and which state before led there."""

    left: Ints
    right: Ints
    value: Floats
    parent: Ints


class _Search:
    """The dynamic program over (left boundary, right boundary) among the stages that cost `most` at most.

    The value is the highest cost so far, or with `boundary_bytes` the bytes that cross the partitions so far.
    """

    def __init__(
        self,
        pairs: Pairs,
        frontier: Sequence[Ints],
        most: float,
        deadline: float,
        width: int | None,
        boundary_bytes: Sequence[int] | None = None,
    ) -> None:
        self._pairs = pairs
        self._frontier = frontier
        self._most = most
        self._deadline = deadline
        self._width = width
        self._crossing = (
            None if boundary_bytes is None else np.concatenate(([0.0], boundary_bytes, [0.0])).astype(float)
        )

    def run(self) -> tuple[int, ...] | None:
        """Return the boundaries of the least value, or None.

        Raises:
            TimeoutError: the deadline came first.
        """
        num_layers = self._pairs.num_layers
        none = np.array([-1])
        start = 0.0 if self._crossing is not None else -np.inf
        trail = [_States(np.array([0]), np.array([num_layers]), np.array([start]), none)]
        for depth in range(self._pairs.depth):
            trail.append(self._inward(depth, trail[-1]))
            if not len(trail[-1].left):
                return None
        value = self._close(trail[-1])
        last = int(np.argmin(value))
        return None if value[last] == np.inf else _read(trail, last, self._pairs.has_middle)

    def _close(self, states: _States) -> Floats:
        """Return the values with the middle stage, infinite if it is too dear."""
        value = states.value.copy()
        if self._pairs.has_middle:
            for term in self._pairs.terms[-1]:
                cost = term.left[states.left, states.right]
                if term.limit is None and self._crossing is None:
                    value = np.maximum(value, cost)
                value[cost > term.cap(self._most)] = np.inf
        return value

    def _inward(self, depth: int, states: _States) -> _States:
        """Place the next pair of stages in all ways."""
        pairs, size = self._pairs, self._pairs.num_layers + 1
        best = np.full(size * size, np.inf)
        parent = np.full(size * size, -1)
        left_over = pairs.left_over(depth + 1)
        inner = self._frontier[depth + 1]
        terms = pairs.terms[depth]
        alive = np.flatnonzero(inner - np.arange(size) >= left_over)
        first = np.searchsorted(alive, states.left, side="right")
        last = np.searchsorted(alive, pairs.reach(terms, self._most)[states.left], side="right") - 1
        for begin, end in _chunks(last - first + 1):
            self._check_time()
            which, place = expand(first[begin:end], last[begin:end])
            self._place_right(terms, states, which + begin, alive[place], left_over, inner, best, parent)
        reached = np.flatnonzero(parent >= 0)
        if self._width is not None and len(reached):
            row = reached // size
            order = np.arange(len(reached)) - np.searchsorted(row, row)
            reached = reached[order < self._width]
        return _States(reached // size, reached % size, best[reached], parent[reached])

    def _place_right(
        self, terms: Sequence[Term], states: _States, which: Ints, left_end: Ints, left_over: int, inner: Ints,
        best: Floats, parent: Ints,
    ) -> None:  # fmt: skip
        """Add what is reached from states `which` by left stages up to `left_end` to `best` and `parent`."""
        for term in terms:
            ok = term.left[states.left[which], left_end] <= term.room(self._most) - term.floor_right
            which, left_end = which[ok], left_end[ok]
        right_end = states.right[which]
        last = np.minimum(inner[left_end], right_end - 1)
        first = left_end + left_over
        for term in terms:
            room = term.room(self._most) - term.left[states.left[which], left_end]
            first = np.maximum(first, nearest(term.low_right, right_end, first, last, room))
        for begin, end in _chunks(last - first + 1):
            self._check_time()
            picked, right_start = expand(first[begin:end], last[begin:end])
            picked += begin
            self._reach(terms, states, which[picked], left_end[picked], right_start, best, parent)

    def _reach(
        self, terms: Sequence[Term], states: _States, which: Ints, left_end: Ints, right_start: Ints,
        best: Floats, parent: Ints,
    ) -> None:  # fmt: skip
        value = states.value[which]
        if self._crossing is not None:
            inward = np.where(right_start > left_end, self._crossing[right_start], 0.0)
            value = value + self._crossing[left_end] + inward
        for term in terms:
            cost = term.left[states.left[which], left_end] + term.right[right_start, states.right[which]]
            if term.limit is None and self._crossing is None:
                value = np.maximum(value, cost)
            ok = cost <= term.cap(self._most)
            which, left_end, right_start, value = which[ok], left_end[ok], right_start[ok], value[ok]
        key = left_end * (self._pairs.num_layers + 1) + right_start
        np.minimum.at(best, key, value)
        wins = best[key] == value
        parent[key[wins]] = which[wins]

    def _check_time(self) -> None:
        if time.perf_counter() > self._deadline:
            raise TimeoutError


def _chunks(counts: Ints) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbours whose counts are about CHUNK together."""
    total = np.cumsum(np.maximum(counts, 0))
    begin = 0
    while begin < len(counts):
        done = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, done + CHUNK, side="right")))
        yield begin, end
        begin = end


def _read(trail: Sequence[_States], last: int, has_middle: bool) -> tuple[int, ...]:
    """Return the boundaries that led to a state."""
    left, right = [], []
    for states in trail[::-1]:
        left.append(int(states.left[last]))
        right.append(int(states.right[last]))
        last = int(states.parent[last])
    boundaries = left[::-1] + right
    if not has_middle:  # the innermost two boundaries are one
        del boundaries[len(left)]
    return tuple(boundaries)


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ROUNDING = 1e-14


@dataclass(frozen=True, slots=True)
class Term:
    """One moment of one rank: the sum of a table over the left stage and one over the right stage of a pair.

    It must be `limit` at most, or, without one, is part of the cost. Of the middle stage only `left` is read.
    """

    left: Table
    right: Table
    low_left: Low
    low_right: Low
    limit: float | None

    def cap(self, most: float) -> float:
        """Return the largest allowed value of the term if the cost may be `most`."""
        return most if self.limit is None else self.limit

    def room(self, most: float) -> float:
        """Return `cap` with room for rounding, so that subtracting one table from it leaves out no sum within it."""
        cap = self.cap(most)
        return cap + abs(cap) * ROUNDING

    @property
    def floor_right(self) -> float:
        """The least that the right stage costs anywhere."""
        return float(self.low_right[0, 0])


class Pairs:
    """The terms of every pair from outside to inside, and of the middle stage if there is one.

    A state is (left boundary, right boundary): all layers outside are placed, `left` and `num_layers - right` of them.
    """

    def __init__(self, problem: Problem) -> None:
        self.num_layers = problem.num_layers
        self.num_stages = problem.num_stages
        self.depth = problem.num_stages // 2
        self._lows: dict[int, Low] = {}
        self._none = np.zeros((problem.num_layers, problem.num_layers + 1))
        self.terms: list[list[Term]] = [[] for _ in range(self.depth + 1)]  # the last are the middle stage's
        for ranks, limit in ((problem.ranks, None), (problem.limits, problem.limit)):
            for rank in ranks:
                outer = min(rank.stages[0], problem.num_stages - 1 - rank.stages[0])
                self.terms[outer] += self._terms(rank, outer, limit)

    @property
    def has_middle(self) -> bool:
        """Whether one stage is its own partner."""
        return self.num_stages % 2 == 1

    def left_over(self, depth: int) -> int:
        """Return the number of stages inside the first `depth` pairs."""
        return self.num_stages - 2 * depth

    def _terms(self, rank: RankCosts, outer: int, limit: float | None) -> list[Term]:
        found = []
        for tables in rank.moments:
            named = list(zip(rank.stages, tables, strict=True))
            left = self._sum([table() for stage, table in named if stage == outer])
            right = self._sum([table() for stage, table in named if stage != outer])
            found.append(Term(left, right, self._low(left), self._low(right), limit))
        return found

    def _sum(self, tables: list[Table]) -> Table:
        total = tables[0] if tables else self._none
        for table in tables[1:]:
            total = total + table
        return total

    def _low(self, table: Table) -> Low:
        if id(table) not in self._lows:
            self._lows[id(table)] = minorant(table)
        return self._lows[id(table)]

    @cached_property
    def lowest(self) -> float:
        """A cost below every partition's: the dearest pair's least."""
        return max(
            (
                float(term.low_left[0, 0]) + float(term.low_right[0, 0])
                for terms in self.terms
                for term in terms
                if term.limit is None
            ),
            default=0.0,
        )

    def completable(self, most: float) -> list[Ints] | None:
        """Return by depth, for every left boundary, the rightmost right boundary that can be completed for `most`.

        It is -1 if there is none, and the whole None if the search from outside cannot be done at all. The
        tables are the minorants and stages may be without layers, so that nothing that can be done is left out: of two
        states the one with more layers placed is never the worse then, and the frontier says all.
        """
        cuts = np.arange(self.num_layers + 1)
        inner = cuts
        if self.has_middle:
            inner = self.reach(self.terms[-1], most)
            inner = np.where(inner >= cuts, inner, -1)
        found = [inner]
        for terms in self.terms[self.depth - 1 :: -1] if self.depth else ():
            inner = self._outward(terms, inner, most)
            if inner.max() < 0:
                return None
            found.append(inner)
        return found[::-1] if inner[0] == self.num_layers else None

    def reach(self, terms: list[Term], most: float) -> Ints:
        """Return how far a left stage may go from each layer on; one less than the layer if nowhere."""
        cuts = np.arange(self.num_layers + 1)
        reach = np.full(len(cuts), self.num_layers)
        for term in terms:
            room = np.full(len(cuts), term.room(most) - term.floor_right)
            reach = np.minimum(reach, furthest(term.low_left, cuts, cuts, reach, room))
        return reach

    def _outward(self, terms: list[Term], inner: Ints, most: float) -> Ints:
        cuts = np.arange(self.num_layers + 1)
        which, left_end = expand(cuts, self.reach(terms, most))
        first = cuts[which]
        alive = inner[left_end] >= left_end
        first, left_end = first[alive], left_end[alive]
        right_first = inner[left_end]
        right = np.full(len(first), self.num_layers)
        for term in terms:
            room = term.room(most) - term.low_left[first, left_end].astype(np.float64)
            right = furthest(term.low_right, right_first, right_first, right, room)
        outer = np.full(len(cuts), -1)
        ok = right >= right_first
        np.maximum.at(outer, first[ok], right[ok])
        return outer


def expand(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return, for ranges first[k] up to and with last[k], the k and the value of every member."""
    count = np.maximum(last - first + 1, 0)
    which = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return which, first[which] + within


def furthest(low: Low, row: Ints, first: Ints, last: Ints, room: Floats) -> Ints:
    """Return the largest column from `first` to `last` at which each row is at most `room`, or first - 1.

    Rows of a minorant rise, so that it is a search by halves, all rows at once.
    """
    flat, base = low.ravel(), row * low.shape[1]
    below, above = first - 1, np.maximum(last, first - 1)
    while np.any(below < above):
        middle = (below + above + 1) >> 1
        fits = flat.take(base + middle) <= room
        below = np.where(fits, middle, below)
        above = np.where(fits, above, middle - 1)
    return below


def nearest(low: Low, column: Ints, first: Ints, last: Ints, room: Floats) -> Ints:
    """Return the least row from `first` to `last` at which each column is at most `room`, or last + 1."""
    flat, width = low.ravel(), low.shape[1]
    below, above = first, last + 1
    while np.any(below < above):
        middle = (below + above) >> 1
        fits = flat.take(middle * width + column) <= room
        above = np.where(fits, middle, above)
        below = np.where(fits, below, middle + 1)
    return above


Order = tuple[tuple[float, ...], int]


def improve(problem: Problem, boundaries: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Return a partition that no move of one boundary by one layer improves, or the best at the deadline.

    Better is less at the highest cost, then at the next one below and so on, then fewer bytes that cross; so that a
    rank which is not the dearest may make room for the one that is. `deadline` is a time.perf_counter().
    """
    judge = _Judge(problem, boundaries)
    reach = max(1, problem.num_layers // (2 * problem.num_stages))
    while reach:
        moved = False
        for cut in range(1, problem.num_stages):
            for shift in (-reach, reach):
                if time.perf_counter() > deadline:
                    return tuple(judge.boundaries)
                moved |= judge.move(cut, shift)
        if not moved:
            reach //= 2
    return tuple(judge.boundaries)


class _Judge:
    """A partition with the costs of its ranks, of which a move changes a few."""

    def __init__(self, problem: Problem, boundaries: Sequence[int]) -> None:
        self.boundaries = list(boundaries)
        self._problem = problem
        self._ranks = [*problem.ranks, *problem.limits]
        self._touched: list[list[int]] = [[] for _ in range(problem.num_stages)]
        for index, rank in enumerate(self._ranks):
            for stage in set(rank.stages):
                self._touched[stage].append(index)
        self._costs = [self._cost(index, self.boundaries) for index in range(len(self._ranks))]
        self._order = self._rate(self._costs, self.boundaries)

    def move(self, cut: int, shift: int) -> bool:
        """Move a boundary if that betters the partition, and return whether it did."""
        place = self.boundaries[cut] + shift
        if not self.boundaries[cut - 1] < place < self.boundaries[cut + 1]:
            return False
        moved = self.boundaries.copy()
        moved[cut] = place
        costs = self._costs.copy()
        for index in {*self._touched[cut - 1], *self._touched[cut]}:
            costs[index] = self._cost(index, moved)
        order = self._rate(costs, moved)
        if order >= self._order:
            return False
        self.boundaries, self._costs, self._order = moved, costs, order
        return True

    def _cost(self, index: int, boundaries: Sequence[int]) -> float:
        rank = self._ranks[index]
        return rank.under(boundaries)

    def _rate(self, costs: Sequence[float], boundaries: Sequence[int]) -> Order:
        """Return what is above the limits first, and then the costs, dearest first."""
        problem, num_ranks = self._problem, len(self._problem.ranks)
        above = max((cost for cost in costs[num_ranks:] if cost > problem.limit), default=0.0)
        return (above, *sorted(costs[:num_ranks], reverse=True)), problem.crossing_bytes(boundaries)

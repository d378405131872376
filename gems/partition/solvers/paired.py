"""Partition of paired stages (GEMS's two directions, or a V) with the least highest pair cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product

import numpy as np

from gems.partition.even import even
from gems.partition.problem import Problem, Solution
from gems.partition.solvers.tables import Floats, Ints, Low, chunks, expand, minorant, problem_terms
from gems.profile.spans import Table

CHUNK = 1_000_000
NARROW = 6  # states kept per left boundary in a search that only looks for a good partition
FIRST_STEP = 2e-4
STEP_GROWTH = 3.0
RESOLUTION = 1e-4
SMALL = 40  # up to this number of layers, all states are cheaper than a search for the threshold
ROUNDING = 1e-14


def partition_pairs(
    problem: Problem, deadline: float, start: Sequence[int] | None = None, enough: float = -np.inf
) -> Solution:
    """Return the partition with the least highest cost of a pair.

    It is exact for any tables unless the deadline comes first. States are the positions of the left
    and the right boundary, from outside to inside. A frontier of the states that can still be
    completed, by minorants of the tables, gives a first bound and leaves a narrow band of states;
    within it the dynamic program reads the true tables. It runs with rising thresholds: a threshold
    at which nothing is found is a bound, and the first partition found at a later one is optimal.
    `deadline` is a time.perf_counter(). `start` is a partition that keeps the limits. The search
    ends at a cost of `enough`.
    """
    pairs = Pairs(problem)
    now = time.perf_counter()
    best = improve(
        problem, start or even(problem.num_layers, problem.num_stages), now + (deadline - now) / 5
    )
    cost = problem.cost(best)
    low, most = (
        (pairs.lowest, cost) if problem.num_layers <= SMALL else _bracket(pairs, cost, deadline)
    )
    if most == np.inf and low == np.inf:
        return Solution(None, np.inf, np.inf, True)
    step = FIRST_STEP
    try:
        while cost > enough:
            most = min(most, cost)
            frontier = pairs.completable(most)
            if frontier is not None:
                for width in (NARROW, None):
                    boundaries = _Search(pairs, frontier, min(most, cost), deadline, width).run()
                    if boundaries is not None and problem.cost(boundaries) < cost:
                        best = boundaries
                        cost = problem.cost(boundaries)
                if cost == np.inf == most:
                    return Solution(None, np.inf, np.inf, True)
                if cost <= most:
                    fewest = _fewest_bytes(pairs, problem, cost, deadline)
                    return Solution(fewest or best, cost, cost, True, fewest is not None)
            low = most
            most = most * (1 + step) if most > 0 else np.inf
            step *= STEP_GROWTH
            if time.perf_counter() > deadline:
                break
    except TimeoutError:
        pass
    return Solution(best if cost < np.inf else None, cost, low, False)


def _bracket(pairs: Pairs, cost: float, deadline: float) -> tuple[float, float]:
    """Return a lower bound of every partition's cost, and a cost that the minorants allow."""
    low = pairs.lowest
    high = cost
    if high == np.inf:
        if pairs.completable(np.inf) is None:
            return np.inf, np.inf
        high = max(low, 1.0)
        while pairs.completable(high) is None:
            low = high
            high = high * 4
    elif pairs.completable(low) is not None:
        high = low
    while high - low > RESOLUTION * abs(high) and time.perf_counter() < deadline:
        middle = (low + high) / 2
        low, high = (middle, high) if pairs.completable(middle) is None else (low, middle)
    return low, high


def _fewest_bytes(
    pairs: Pairs, problem: Problem, cost: float, deadline: float
) -> tuple[int, ...] | None:
    frontier = pairs.completable(cost)
    assert frontier is not None
    try:
        return _Search(pairs, frontier, cost, deadline, None, problem.crossing).run()
    except TimeoutError:
        return None


@dataclass(frozen=True, slots=True)
class _States:
    """The states reached at one depth.

    They have the positions of the two boundaries, the value, and the index of the previous state.
    """

    left: Ints
    right: Ints
    value: Floats
    parent: Ints


@dataclass(frozen=True, slots=True)
class _Search:
    """The dynamic program over boundary pairs, among the stages that cost at most `most`.

    The value is the highest cost so far. With `crossing`, the bytes at each boundary, it is the
    bytes that cross the boundaries so far. Only `width` states of each left boundary are kept.
    TimeoutError is raised when the deadline has passed.
    """

    pairs: Pairs
    frontier: Sequence[Ints]
    most: float
    deadline: float
    width: int | None
    crossing: Floats | None = None

    def run(self) -> tuple[int, ...] | None:
        """Return the boundaries of the least value, or None if there are none."""
        start = 0.0 if self.crossing is not None else -np.inf
        trail = [
            _States(
                np.array([0]), np.array([self.pairs.num_layers]), np.array([start]), np.array([-1])
            )
        ]
        for depth in range(self.pairs.depth):
            trail.append(self._inward(depth, trail[-1]))
            if not len(trail[-1].left):
                return None
        value = self._close(trail[-1])
        last = int(np.argmin(value))
        return None if value[last] == np.inf else _read(trail, last, self.pairs.has_middle)

    def _close(self, states: _States) -> Floats:
        """Return the values including the middle stage, infinite if it is too expensive."""
        value = states.value.copy()
        for term in self.pairs.terms[-1] if self.pairs.has_middle else ():
            cost = term.left[states.left, states.right]
            if term.limit is None and self.crossing is None:
                value = np.maximum(value, cost)
            value[cost > term.cap(self.most)] = np.inf
        return value

    def _inward(self, depth: int, states: _States) -> _States:
        size = self.pairs.num_layers + 1
        best = np.full(size * size, np.inf)
        parent = np.full(size * size, -1)
        for which, left_end, right_start in self._places(depth, states):
            value = states.value[which]
            if self.crossing is not None:
                inward = np.where(right_start > left_end, self.crossing[right_start], 0.0)
                value = value + self.crossing[left_end] + inward
            for term in self.pairs.terms[depth]:
                cost = (
                    term.left[states.left[which], left_end]
                    + term.right[right_start, states.right[which]]
                )
                if term.limit is None and self.crossing is None:
                    value = np.maximum(value, cost)
                ok = cost <= term.cap(self.most)
                which = which[ok]
                left_end = left_end[ok]
                right_start = right_start[ok]
                value = value[ok]
            key = left_end * size + right_start
            np.minimum.at(best, key, value)
            wins = best[key] == value
            parent[key[wins]] = which[wins]
        reached = np.flatnonzero(parent >= 0)
        if self.width is not None and len(reached):
            row = reached // size
            reached = reached[np.arange(len(reached)) - np.searchsorted(row, row) < self.width]
        return _States(reached // size, reached % size, best[reached], parent[reached])

    def _places(self, depth: int, states: _States) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield states with reachable ends of the next left and starts of the next right stage."""
        terms = self.pairs.terms[depth]
        left_over = self.pairs.num_stages - 2 * (depth + 1)
        inner = self.frontier[depth + 1]
        alive = np.flatnonzero(inner - np.arange(len(inner)) >= left_over)
        begin = np.searchsorted(alive, states.left, side="right")
        stop = (
            np.searchsorted(alive, self.pairs.reach(terms, self.most)[states.left], side="right")
            - 1
        )
        for part in chunks(stop - begin + 1, CHUNK, self.deadline):
            which, place = expand(begin[part], stop[part])
            which = which + part.start
            left_end = alive[place]
            for term in terms:
                ok = (
                    term.left[states.left[which], left_end]
                    <= term.room(self.most) - term.floor_right
                )
                which = which[ok]
                left_end = left_end[ok]
            right_end = states.right[which]
            last = np.minimum(inner[left_end], right_end - 1)
            first = left_end + left_over
            for term in terms:
                room = term.room(self.most) - term.left[states.left[which], left_end]
                first = np.maximum(first, nearest(term.low_right, right_end, first, last, room))
            for slots in chunks(last - first + 1, CHUNK, self.deadline):
                picked, right_start = expand(first[slots], last[slots])
                picked = picked + slots.start
                yield which[picked], left_end[picked], right_start


def _read(trail: Sequence[_States], last: int, has_middle: bool) -> tuple[int, ...]:
    left = []
    right = []
    for states in trail[::-1]:
        left.append(int(states.left[last]))
        right.append(int(states.right[last]))
        last = int(states.parent[last])
    # without a middle stage, the innermost two boundaries are the same
    return (*left[::-1], *right[not has_middle :])


@dataclass(frozen=True, slots=True)
class PairTerm:
    """One moment of one rank: the sum of a table over the left and one over the right stage.

    It must not exceed `limit`; without a limit, it is part of the cost. For the middle stage only
    `left` is used.
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
        """Return `cap` with a margin for rounding.

        Subtracting one table from it then rejects no sum within the cap.
        """
        cap = self.cap(most)
        return cap + abs(cap) * ROUNDING

    @property
    def floor_right(self) -> float:
        """The least cost of the right stage anywhere."""
        return float(self.low_right[0, 0])


class Pairs:
    """The terms of every pair from outside to inside, and of the middle stage if there is one.

    A state is (left boundary, right boundary): all layers outside are placed, `left` and
    `num_layers - right` of them.
    """

    def __init__(self, problem: Problem) -> None:
        self.num_layers = problem.num_layers
        self.num_stages = problem.num_stages
        self.depth = problem.num_stages // 2
        # the last list is that of the middle stage
        self.terms: list[list[PairTerm]] = [[] for _ in range(self.depth + 1)]
        self._cuts = np.arange(self.num_layers + 1)
        nothing = np.zeros((problem.num_layers, problem.num_layers + 1))
        lows: dict[int, Low] = {}
        for term in problem_terms(problem):
            outer = min(term.tables[0][0], problem.num_stages - 1 - term.tables[0][0])
            halves: list[list[Table]] = [[], []]
            for stage, table in term.tables:
                halves[stage != outer].append(table)
            left, right = (reduce(np.add, tables) if tables else nothing for tables in halves)
            for table in (left, right):
                if id(table) not in lows:
                    lows[id(table)] = minorant(table)
            self.terms[outer].append(
                PairTerm(left, right, lows[id(left)], lows[id(right)], term.limit)
            )

    @property
    def has_middle(self) -> bool:
        """Whether one stage is its own partner."""
        return self.num_stages % 2 == 1

    @cached_property
    def lowest(self) -> float:
        """A lower bound of every partition's cost: the least cost of the most expensive pair."""
        judged = (term for terms in self.terms for term in terms if term.limit is None)
        return max((float(term.low_left[0, 0]) + term.floor_right for term in judged), default=0.0)

    def completable(self, most: float) -> list[Ints] | None:
        """Return, by depth, the rightmost right boundary that can be completed for each left one.

        The cost is at most `most`. An entry is -1 if there is no such boundary; the result is None
        if the search from outside cannot be completed at all. The tables are the minorants, and
        stages may be empty, so no feasible state is left out: of two states, the one with more
        layers placed is never the worse one, and so the frontier is sufficient.
        """
        inner = self._cuts
        if self.has_middle:
            reach = self.reach(self.terms[-1], most)
            inner = np.where(reach >= self._cuts, reach, -1)
        frontiers = [inner]
        for terms in self.terms[self.depth - 1 :: -1] if self.depth else ():
            inner = self._outward(terms, inner, most)
            if inner.max() < 0:
                return None
            frontiers.append(inner)
        return frontiers[::-1] if inner[0] == self.num_layers else None

    def reach(self, terms: list[PairTerm], most: float) -> Ints:
        """Return how far a left stage that starts at each layer may extend.

        It is one less than the layer if no stage is possible.
        """
        reach = np.full(len(self._cuts), self.num_layers)
        for term in terms:
            room = np.full(len(self._cuts), term.room(most) - term.floor_right)
            reach = np.minimum(reach, furthest(term.low_left, self._cuts, self._cuts, reach, room))
        return reach

    def _outward(self, terms: list[PairTerm], inner: Ints, most: float) -> Ints:
        first, left_end = expand(self._cuts, self.reach(terms, most))
        alive = inner[left_end] >= left_end
        first = first[alive]
        left_end = left_end[alive]
        right_first = inner[left_end]
        right = np.full(len(first), self.num_layers)
        for term in terms:
            room = term.room(most) - term.low_left[first, left_end].astype(np.float64)
            right = furthest(term.low_right, right_first, right_first, right, room)
        outer = np.full(len(self._cuts), -1)
        ok = right >= right_first
        np.maximum.at(outer, first[ok], right[ok])
        return outer


def furthest(low: Low, row: Ints, first: Ints, last: Ints, room: Floats) -> Ints:
    """Return the largest column from `first` to `last` at which each row is at most `room`.

    It is first - 1 if there is none. The rows of a minorant rise, so this is a binary search over
    all rows at once.
    """
    flat = low.ravel()
    base = row * low.shape[1]
    below = first - 1
    above = np.maximum(last, first - 1)
    while np.any(below < above):
        middle = (below + above + 1) >> 1
        fits = flat.take(base + middle) <= room
        below = np.where(fits, middle, below)
        above = np.where(fits, above, middle - 1)
    return below


def nearest(low: Low, column: Ints, first: Ints, last: Ints, room: Floats) -> Ints:
    """Return the least row from `first` to `last` at which each column is at most `room`.

    It is last + 1 if there is none.
    """
    flat = low.ravel()
    width = low.shape[1]
    below = first
    above = last + 1
    while np.any(below < above):
        middle = (below + above) >> 1
        fits = flat.take(middle * width + column) <= room
        above = np.where(fits, middle, above)
        below = np.where(fits, below, middle + 1)
    return above


def improve(problem: Problem, boundaries: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Return a partition that no move of a boundary by one layer improves.

    At the deadline it is the best one so far. A partition is better if it exceeds the limits by
    less; then if its highest cost is lower, then the next highest, and so on; then if fewer bytes
    cross. Thus a rank that is not the most expensive one may make room for the one that is.
    `deadline` is a time.perf_counter().
    """
    ranks = [*problem.ranks, *problem.limits]
    num_judged = len(problem.ranks)
    touched = [
        {k for k, rank in enumerate(ranks) if stage in rank.stages}
        for stage in range(problem.num_stages)
    ]

    def rated(costs: Sequence[float], cuts: Sequence[int]) -> tuple[tuple[float, ...], int]:
        above = max((cost for cost in costs[num_judged:] if cost > problem.limit), default=0.0)
        return (above, *sorted(costs[:num_judged], reverse=True)), problem.crossing_bytes(cuts)

    best = list(boundaries)
    costs = [rank.under(boundaries) for rank in ranks]
    rating = rated(costs, best)
    reach = max(1, problem.num_layers // (2 * problem.num_stages))
    while reach:
        has_moved = False
        for cut, shift in product(range(1, problem.num_stages), (-reach, reach)):
            if time.perf_counter() > deadline:
                return tuple(best)
            place = best[cut] + shift
            if not best[cut - 1] < place < best[cut + 1]:
                continue
            tried = [*best[:cut], place, *best[cut + 1 :]]
            changed = costs.copy()
            for index in touched[cut - 1] | touched[cut]:
                changed[index] = ranks[index].under(tried)
            if (other := rated(changed, tried)) < rating:
                best = tried
                costs = changed
                rating = other
                has_moved = True
        reach = reach if has_moved else reach // 2
    return tuple(best)

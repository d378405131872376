"""Stages in pairs: GEMS's two directions or a V. The cut of the least highest cost of a pair."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gems.partition.even import even
from gems.partition.problem import Answer, Problem
from gems.partition.solvers.improve import improve
from gems.partition.solvers.pairs import Floats, Ints, Pairs, Term, expand, nearest

CHUNK = 1_000_000
NARROW = 6  # states kept of one left cut in a search that only looks for a good cut
FIRST_STEP, STEP_GROWTH = 2e-4, 3.0
RESOLUTION = 1e-4
SMALL = 40  # layers up to which all states are cheaper than a search for the threshold


def cut_pairs(problem: Problem, deadline: float, start: Sequence[int] | None = None, enough: float = -np.inf) -> Answer:
    """Return the cut whose dearest pair costs least, exact for any tables unless the deadline comes first.

    States are the places of the left and the right cut, from outside to inside. A frontier of what can still be
    completed, by minorants of the tables, gives a first bound and leaves a thin band of states; within it the dynamic
    program reads the true tables. It is run at rising thresholds: one at which nothing is found is a bound, and what
    is found at another is the least there is. `deadline` is a time.perf_counter(); `start` a cut that keeps the
    limits; at a cost of `enough` the search ends.
    """
    pairs = Pairs(problem)
    best = tuple(start or even(problem.num_layers, problem.num_stages))
    now = time.perf_counter()
    best = improve(problem, best, now + (deadline - now) / 5)
    cost = problem.cost(best)
    low, most = (pairs.lowest, cost) if problem.num_layers <= SMALL else _bracket(pairs, cost, deadline)
    if most == np.inf and low == np.inf:
        return Answer(None, np.inf, np.inf, True)
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
                    return Answer(None, np.inf, np.inf, True)
                if cost <= most:
                    fewest = _with_fewest_bytes(pairs, problem, cost, deadline)
                    return Answer(fewest or best, cost, cost, True, fewest is not None)
            low, most = most, most * (1 + step) if most > 0 else np.inf
            step *= STEP_GROWTH
            if time.perf_counter() > deadline:
                break
    except TimeoutError:
        pass
    return Answer(best if cost < np.inf else None, cost, low, False)


def _bracket(pairs: Pairs, cost: float, deadline: float) -> tuple[float, float]:
    """Return a cost below every cut's and one at which the minorants allow a cut, near it if the deadline allows."""
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
    """What is reached at one depth: places of the two cuts, the value, and which state before led there."""

    left: Ints
    right: Ints
    value: Floats
    parent: Ints


class _Search:
    """The dynamic program over (left cut, right cut) among the stages that cost `most` at most.

    The value is the highest cost so far, or with `boundary_bytes` the bytes that cross the cuts so far.
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
        """Return the values with the middle stage, infinite where it is too dear."""
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
    if not has_middle:  # the innermost two cuts are one
        del boundaries[len(left)]
    return tuple(boundaries)

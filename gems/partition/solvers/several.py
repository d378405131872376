"""Partition of several stages per rank in any places (looped and wave), by a widening beam."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gems.partition.even import even
from gems.partition.problem import Problem, Solution
from gems.partition.solvers.relaxed import Bound, Relaxation, Shaker
from gems.partition.solvers.tables import Floats, Ints, chunks, expand, valid
from gems.profile.spans import Table

# sums of more than two tables have another order of summation than RankCosts.at
ROUNDING = 1e-12
FIRST_WIDTH = 32
WIDENING = 4
CHUNK = 2_000_000  # numbers per chunk


def partition_several(
    problem: Problem, deadline: float, start: Sequence[int] | None = None, enough: float = -np.inf
) -> Solution:
    """Return the partition whose most expensive rank costs least.

    It is proven (to rounding) unless the deadline comes first. A beam searches partitions stage by
    stage: of all first stages, then of all first two and so on, it keeps those whose whole
    partitions may cost least, by the cost of each rank so far and by a Lagrangian relaxation.
    Partitions that cannot be better than the best one known are left out. A beam wide enough to
    leave out nothing else is a proof, so it is widened until the deadline, a time.perf_counter().
    `start` is a partition that keeps the limits. The search ends at a cost of `enough`.
    """
    begin = time.perf_counter()
    first = tuple(start or even(problem.num_layers, problem.num_stages))
    shaker = Shaker(problem, first, begin + (deadline - begin) / 3)
    relaxation = Relaxation(problem)
    bound = relaxation.raise_bound(shaker, begin + (deadline - begin) / 3)
    low = max(relaxation.bottleneck(), bound.value) * (1 - ROUNDING)
    beam = _Beam(problem, relaxation, bound, deadline)
    width = FIRST_WIDTH
    is_whole = shaker.cost * (1 - ROUNDING) <= low
    try:
        while not is_whole and shaker.cost > enough:
            now = time.perf_counter()
            boundaries, is_whole = beam.run(shaker.cost, width)
            if boundaries is not None:
                shaker.offer(boundaries, deadline)
            if not is_whole:
                spent = time.perf_counter() - now
                shaker.shake(min(deadline, time.perf_counter() + spent))
            width *= WIDENING
    except TimeoutError:
        pass
    best = shaker.best
    cost = problem.cost(best)
    if cost == np.inf:
        return Solution(None, np.inf, np.inf if is_whole else low, is_whole)
    if not is_whole:
        return Solution(best, cost, min(low, cost), False)
    return _with_fewest_bytes(problem, beam, best)


def _with_fewest_bytes(problem: Problem, beam: _Beam, best: tuple[int, ...]) -> Solution:
    cost = problem.cost(best)
    width = FIRST_WIDTH
    is_whole = False
    try:
        while not is_whole:
            boundaries, is_whole = beam.run(cost, width, problem.crossing_bytes(best))
            best = boundaries or best
            width *= WIDENING
    except TimeoutError:
        pass
    return Solution(best, cost, cost, True, is_whole)


class _Level(NamedTuple):
    """Partial partitions: ends of the last stage, sums of all terms, and predecessors."""

    end: Ints
    sums: Floats
    crossing: Floats
    parent: Ints
    rating: Floats

    def take(self, chosen: Ints) -> _Level:
        """Return a selection of them."""
        return _Level._make(column[chosen] for column in self)


class _Beam:
    """Partial partitions, one stage per level, with lower bounds of the rest of each term."""

    def __init__(
        self, problem: Problem, relaxation: Relaxation, bound: Bound, deadline: float
    ) -> None:
        self._problem = problem
        self._bound = bound
        self._deadline = deadline
        self._num_terms = len(relaxation.terms)
        caps = [np.inf if term.limit is None else term.limit for term in relaxation.terms]
        self._caps = np.array(caps) * (1 + ROUNDING)
        self._is_limit = relaxation.is_limit
        self._on: list[list[tuple[int, Table]]] = [[] for _ in range(problem.num_stages)]
        for index, term in enumerate(relaxation.terms):
            for stage, table in term.tables:
                self._on[stage].append((index, table))
        self._rest = self._least_rest()
        self._bytes_to_go = self._fewest_to_go()

    def run(
        self, cost: float, width: int, most_bytes: float | None = None
    ) -> tuple[tuple[int, ...] | None, bool]:
        """Return a beam's best partition that costs less than `cost`, and whether it is certain.

        It is certain if nothing was left out that may be better. With `most_bytes`, it is the
        partition of cost `cost` with the fewest crossing bytes, if they are fewer than that.

        Raises:
            TimeoutError: The deadline came first.
        """
        zero = np.zeros(1, dtype=np.int64)
        trail = [_Level(zero, np.zeros((1, self._num_terms)), np.zeros(1), zero, np.zeros(1))]
        is_whole = True
        for stage in range(self._problem.num_stages):
            level, was_whole = self._next(stage, trail[-1], cost, width, most_bytes)
            is_whole &= was_whole
            trail.append(level)
        return self._best(trail, cost, most_bytes), is_whole

    def _best(
        self, trail: Sequence[_Level], cost: float, most_bytes: float | None
    ) -> tuple[int, ...] | None:
        problem = self._problem
        rating = trail[-1].rating
        if most_bytes is not None:
            within = (_read(trail, last) for last in range(len(rating)))
            return next(
                (boundaries for boundaries in within if problem.cost(boundaries) <= cost), None
            )
        alike = (
            int(np.searchsorted(rating, rating[0] * (1 + 4 * ROUNDING), side="right"))
            if len(rating)
            else 0
        )
        best = min((_read(trail, last) for last in range(alike)), key=problem.cost, default=None)
        return None if best is None or problem.cost(best) >= cost else best

    def _next(
        self, stage: int, level: _Level, cost: float, width: int, most_bytes: float | None
    ) -> tuple[_Level, bool]:
        """Return the level with one more stage, and whether it is complete."""
        problem = self._problem
        last = problem.num_layers - (problem.num_stages - stage - 1)
        first = level.end + 1 if stage < problem.num_stages - 1 else np.full(len(level.end), last)
        levels: list[_Level] = []
        num_grown = 0
        num_kept = 0
        for part in chunks((last - first + 1) * self._num_terms, CHUNK, self._deadline):
            which, end = expand(first[part], np.full(len(first[part]), last))
            levels.append(self._grow(stage, level, which + part.start, end, cost, most_bytes))
            num_grown = num_grown + len(levels[-1].end)
            num_kept = num_kept + len(levels[-1].end)
            if num_kept > 4 * width:
                levels = [_first_rated(levels, width)]
                num_kept = width
        return _first_rated(levels, width) if levels else level, num_grown <= width

    def _grow(
        self,
        stage: int,
        level: _Level,
        which: Ints,
        end: Ints,
        cost: float,
        most_bytes: float | None,
    ) -> _Level:
        """Return the partitions `which` with one more stage up to `end`, if they can be better."""
        most = cost * (1 - ROUNDING) if most_bytes is None else cost * (1 + ROUNDING)
        caps = np.where(self._is_limit, self._caps, most)
        rest = self._rest[stage + 1]
        for index, table in self._on[stage]:
            here = level.sums[which, index] + table[level.end[which], end] + rest[end, index]
            which = which[here <= caps[index]]
            end = end[here <= caps[index]]
        sums = level.sums[which]
        for index, table in self._on[stage]:
            sums[:, index] += table[level.end[which], end]
        final = sums + rest[end]
        low = np.maximum(
            final[:, ~self._is_limit].max(axis=1),
            sums @ self._bound.weights + self._bound.to_go[stage + 1, end] - self._bound.offset,
        )
        crossing = level.crossing[which] + self._problem.crossing[end]
        rating = low
        open_ = (low <= most) & np.all(final <= caps, axis=1)
        if most_bytes is not None:
            rating = crossing + self._bytes_to_go[stage + 1, end]
            open_ &= rating < most_bytes
        chosen = np.flatnonzero(open_)
        return _Level(end, sums, crossing, which, rating).take(chosen)

    def _least_rest(self) -> list[Floats]:
        """Return lower bounds of the sums of later stages by term, for each stage: (L + 1, terms).

        The first axis of an array is the layer at which the later stages begin.
        """
        num_layers = self._problem.num_layers
        read = valid(num_layers)
        rest = [np.zeros((num_layers + 1, self._num_terms))]
        for stage in range(self._problem.num_stages - 1, -1, -1):
            added = rest[-1].copy()
            for index, table in self._on[stage]:
                least = np.where(read, table, np.inf).min(axis=1)
                added[:-1, index] += np.minimum.accumulate(least[::-1])[::-1]
            rest.append(added)
        return rest[::-1]

    def _fewest_to_go(self) -> Floats:
        """Return by stage and begin the fewest bytes that cross the boundaries after it."""
        num_layers = self._problem.num_layers
        num_stages = self._problem.num_stages
        to_go = np.full((num_stages + 1, num_layers + 1), np.inf)
        to_go[num_stages, num_layers] = 0.0
        for stage in range(num_stages - 1, -1, -1):
            after = self._problem.crossing + to_go[stage + 1]
            to_go[stage, :-1] = np.minimum.accumulate(after[:0:-1])[::-1]
        return to_go


def _first_rated(levels: Sequence[_Level], width: int) -> _Level:
    whole = _Level._make(map(np.concatenate, zip(*levels, strict=True)))
    return whole.take(np.argsort(whole.rating, kind="stable")[:width])


def _read(trail: Sequence[_Level], last: int) -> tuple[int, ...]:
    boundaries = []
    for level in trail[::-1]:
        boundaries.append(int(level.end[last]))
        last = int(level.parent[last])
    return tuple(boundaries[::-1])

"""Pairs: the terms that stages s and S-1-s are judged by together, and which places can still be completed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gems.partition.problem import Problem
from gems.partition.solvers.tables import Low, minorant
from gems.profile.spans import RankCosts, Table

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
        """Return what the term may be where the cost may be `most`."""
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
    """The terms of every pair from outside to inside, and of the middle stage where there is one.

    A state is (left cut, right cut): all layers outside are placed, `left` and `num_layers - right` of them.
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
        """A cost below every cut's: the dearest pair's least."""
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
        """Return by depth, for every left cut, the rightmost right cut whose inside may be done for `most` at most.

        It is -1 where there is none, and the whole None where the search from outside cannot be done at all. The
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
        """Return how far a left stage may go from each layer on; one less than the layer where nowhere."""
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
    """Return the largest column from `first` to `last` in which each row is `room` at most; first - 1 where none.

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
    """Return the least row from `first` to `last` in which each column is `room` at most; last + 1 where none."""
    flat, width = low.ravel(), low.shape[1]
    below, above = first, last + 1
    while np.any(below < above):
        middle = (below + above) >> 1
        fits = flat.take(middle * width + column) <= room
        above = np.where(fits, middle, above)
        below = np.where(fits, below, middle + 1)
    return above

"""Tables for the solvers.

They are built once, summed over terms that are rated together, and made monotone from below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gems.partition.problem import Problem
from gems.profile.spans import RankCosts, Table

Low = NDArray[np.float32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Build = Callable[[], Table]
Windows = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Term:
    """One moment of one rank: the sum of a table over each of its stages.

    `limit` is None if the term is part of the cost.
    """

    tables: tuple[tuple[int, Table], ...]
    limit: float | None

    def at(self, boundaries: Sequence[int]) -> float:
        """Return the sum under a partition."""
        return sum(float(table[boundaries[s], boundaries[s + 1]]) for s, table in self.tables)


def problem_terms(problem: Problem) -> list[Term]:
    """Return the terms of a problem; terms of the cost come first."""
    return [
        Term(
            tuple((stage, table()) for stage, table in zip(rank.stages, tables, strict=True)), limit
        )
        for ranks, limit in ((problem.ranks, None), (problem.limits, problem.limit))
        for rank in ranks
        for tables in rank.moments
    ]


def kept(problem: Problem) -> Problem:
    """Return the same problem with tables that are built only at the first call.

    Equal callables share a table.
    """
    known: dict[Build, Build] = {}

    def keep(build: Build) -> Build:
        return known.setdefault(build, cache(lambda: np.asarray(build(), dtype=np.float64)))

    def keep_all(ranks: tuple[RankCosts, ...]) -> tuple[RankCosts, ...]:
        return tuple(
            RankCosts(rank.stages, tuple(tuple(map(keep, row)) for row in rank.moments))
            for rank in ranks
        )

    return replace(problem, ranks=keep_all(problem.ranks), limits=keep_all(problem.limits))


def valid(num_layers: int) -> NDArray[np.bool_]:
    """Return a mask of the entries of an array (L, L + 1) that are used: [i, e] with e > i."""
    return np.arange(num_layers + 1)[None, :] > np.arange(num_layers)[:, None]


def widest(problem: Problem) -> Windows:
    """Return the smallest and largest position of every boundary that leave each stage a layer."""
    num_layers = problem.num_layers
    num_stages = problem.num_stages
    inner = [(stage, num_layers - num_stages + stage) for stage in range(1, num_stages)]
    return [(0, 0), *inner, (num_layers, num_layers)]


def run_block(windows: Windows, stage: int, value: float) -> tuple[tuple[slice, slice], Table]:
    """Return the slices of a stage's windows in the tables, and a table of one value.

    The table is infinite for empty stages.
    """
    (first, last), (low, high) = windows[stage], windows[stage + 1]
    is_run = np.arange(low, high + 1)[None, :] > np.arange(first, last + 1)[:, None]
    return (slice(first, last + 1), slice(low, high + 1)), np.where(is_run, value, np.inf)


def minorant(table: Table) -> Low:
    """Return the largest monotone table (L + 1, L + 1) below another one, in single precision.

    It is rounded down. Entry [i, e] is the least cost of a span that contains layers i up to e; [i,
    i], for a stage without layers, is the least cost of any. Below the diagonal it is infinite.
    """
    num_layers = len(table)
    outside = ~valid(num_layers)
    low = np.full((num_layers + 1, num_layers + 1), np.inf, dtype=np.float32)
    np.nextafter(table.astype(np.float32), np.float32(-np.inf), out=low[:-1])
    low[:-1][outside] = np.inf
    floor = low.min()
    np.minimum.accumulate(low, axis=0, out=low)
    np.minimum.accumulate(low[:, ::-1], axis=1, out=low[:, ::-1])
    low[:-1][outside] = low[-1] = np.inf
    np.fill_diagonal(low, floor)
    return low


def expand(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return, for ranges first[k] to last[k] inclusive, the k and the value of every member."""
    count = np.maximum(last - first + 1, 0)
    which = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return which, first[which] + within


def chunks(counts: Ints, size: int, deadline: float) -> Iterator[slice]:
    """Yield slices of neighbours whose counts sum up to about `size`.

    Raises:
        TimeoutError: The deadline, a time.perf_counter(), has passed.
    """
    total = np.cumsum(np.maximum(counts, 0))
    begin = 0
    while begin < len(counts):
        if time.perf_counter() > deadline:
            raise TimeoutError
        done = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, done + size, side="right")))
        yield slice(begin, end)
        begin = end

"""Large moves: all boundaries of a run of neighbouring stages settled again at once, the others being fixed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from gems.partition.problem import Problem
from gems.partition.solvers.chain import cut_chain
from gems.profile.spans import RankCosts, Table

SHAKEN = 0.5  # share of the boundaries


class Shaker:
    """The best cut so far, and ways to better ones: every cut offered is settled, and the best one shaken and settled.

    What is shaken is drawn from a fixed seed; how often depends on the time given.
    """

    def __init__(self, problem: Problem, start: Sequence[int], deadline: float) -> None:
        self._problem = problem
        self._random = random.Random(0)
        self.best = tuple(start)
        self.cost = problem.cost(start)
        self.offer(start, deadline)

    def offer(self, boundaries: Sequence[int], deadline: float) -> None:
        """Take a cut, settled until the deadline, if it is better than the best."""
        for each in (tuple(boundaries), resettle(self._problem, boundaries, deadline)):
            if self._problem.cost(each) < self.cost:
                self.best, self.cost = each, self._problem.cost(each)

    def shake(self, deadline: float) -> None:
        """Move half of the boundaries a little and settles the cut, again and again until the deadline."""
        problem, draw = self._problem, self._random
        reach = max(1, problem.num_layers // (2 * problem.num_stages))
        while time.perf_counter() < deadline:
            moved = list(self.best)
            for cut in range(1, problem.num_stages):
                if draw.random() < SHAKEN:
                    low, high = moved[cut - 1] + 1, moved[cut + 1] - 1
                    moved[cut] = draw.randint(max(low, moved[cut] - reach), min(high, moved[cut] + reach))
            self.offer(moved, deadline)


def resettle(problem: Problem, boundaries: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Return a cut that no such move betters, or the best one at the deadline (a time.perf_counter()).

    Stages of a run are all on different ranks, so that with the other stages fixed they are a chain, whose tables are
    raised by what their ranks hold elsewhere: the move is the best one there is.
    """
    best = tuple(boundaries)
    runs = runs_of(problem)
    idle, index = 0, 0
    while idle < len(runs) and time.perf_counter() < deadline:
        first, end = runs[index % len(runs)]
        index += 1
        idle += 1
        moved = _settled(problem, best, first, end)
        if moved is not None and _rank(problem, moved) < _rank(problem, best):
            best, idle = moved, 0
    return best


def runs_of(problem: Problem) -> list[tuple[int, int]]:
    """Return the longest runs of two or more stages (first, end) that are all on different ranks."""
    together: list[set[int]] = [set() for _ in range(problem.num_stages)]
    for rank in (*problem.ranks, *problem.limits):
        for stage in rank.stages:
            together[stage] |= set(rank.stages) - {stage}
    runs: list[tuple[int, int]] = []
    for first in range(problem.num_stages):
        end = first + 1
        while end < problem.num_stages and not together[end] & set(range(first, end)):
            end += 1
        if end - first > 1 and (not runs or end > runs[-1][1]):
            runs.append((first, end))
    return runs


def _rank(problem: Problem, boundaries: Sequence[int]) -> tuple[float, ...]:
    """Return what cuts are ordered by: the costs of all ranks, dearest first."""
    if problem.cost(boundaries) == np.inf:
        return (np.inf,)
    return tuple(sorted((rank.under(boundaries) for rank in problem.ranks), reverse=True))


def _settled(problem: Problem, boundaries: Sequence[int], first: int, end: int) -> tuple[int, ...] | None:
    """Return the cut with the boundaries inside stages `first` up to `end` settled again."""
    low, high = boundaries[first], boundaries[end]
    chain = Problem(
        high - low, end - first,
        _raised(problem, problem.ranks, boundaries, first, end), problem.boundary_bytes[low : high - 1],
        _raised(problem, problem.limits, boundaries, first, end), problem.limit,
    )  # fmt: skip
    inside = cut_chain(chain)
    if inside is None:
        return None
    return (*boundaries[:first], *(low + cut for cut in inside), *boundaries[end + 1 :])


def _raised(
    problem: Problem, ranks: Sequence[RankCosts], boundaries: Sequence[int], first: int, end: int
) -> tuple[RankCosts, ...]:
    """Return the costs of the stages of a run as a chain's, with what their ranks hold elsewhere added."""
    part = (slice(boundaries[first], boundaries[end]), slice(boundaries[first], boundaries[end] + 1))
    found = []
    for rank in ranks:
        spans = rank.spans(boundaries)
        for place, stage in enumerate(rank.stages):
            if first <= stage < end:
                moments = [
                    tables[place]()[part]
                    + sum(
                        float(table()[span])
                        for k, (table, span) in enumerate(zip(tables, spans, strict=True))
                        if k != place
                    )
                    for tables in rank.moments
                ]
                found.append(RankCosts((stage - first,), ((_given(np.maximum.reduce(moments)),),)))
    return tuple(found)


def _given(table: Table) -> Callable[[], Table]:
    return lambda: table

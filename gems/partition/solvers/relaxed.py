"""A relaxation: the highest of several costs is replaced by a weighted mean.

The best partition by a weighted mean is a shortest path.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gems.partition.problem import Problem
from gems.partition.solvers.chain import least_highest, partition_chain
from gems.partition.solvers.tables import Floats, problem_terms, run_block, valid, widest
from gems.profile.spans import RankCosts, Table

ROUNDS = 400
CUTS_OF_A_ROUND = 20  # a round of the relaxation takes as long as rating this many partitions
PATIENCE = 15  # rounds without a better bound, after which the steps are halved


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of every partition's cost, and the weights of the terms that prove it.

    `to_go[s][i]` is the least weighted cost of stages s to the last if stage s begins at layer i.
    The weighted cost of a whole partition, minus `offset`, is at most its cost.
    """

    value: float
    weights: Floats
    to_go: Floats
    offset: float


class Relaxation:
    """Lagrangian bounds of a problem.

    For any weights with sum 1, the highest term is at least their weighted mean. The best partition
    by a weighted mean is a shortest path over stages and boundaries, with S L^2 entries in total
    for any tables. Limits are included by multipliers. The weights are improved by a subgradient
    with Polyak's step (Held, Wolfe and Crowder 1974, "Validation of subgradient optimization",
    section 3).
    """

    def __init__(self, problem: Problem) -> None:
        self.terms = problem_terms(problem)
        self.is_limit = np.array([term.limit is not None for term in self.terms], dtype=bool)
        self._problem = problem
        self._windows = widest(problem)

    def raise_bound(self, shaker: Shaker, deadline: float) -> Bound:
        """Return the best bound found by the deadline (a time.perf_counter()).

        Partitions that are found on the way are offered to `shaker`.
        """
        problem = self._problem
        weights = self._first_weights(shaker.best)
        bound, path = self.bound(weights)
        step = 1.0
        idle = 0
        num_cuts = math.comb(problem.num_layers - 1, problem.num_stages - 1)
        for _ in range(min(ROUNDS, num_cuts // CUTS_OF_A_ROUND)):
            if bound.value >= shaker.cost or step < 1e-3 or time.perf_counter() > deadline:
                break
            reached = shaker.cost if shaker.cost < np.inf else 2 * bound.value
            weights = self._moved(weights, path, reached, step * (reached - bound.value))
            tried, path = self.bound(weights)
            if tried.value > bound.value * (1 + 1e-6):
                idle = 0
                shaker.offer(path, deadline)
            else:
                idle += 1
                if idle == PATIENCE:
                    step = step / 2
                    idle = 0
                    weights = bound.weights
                    _, path = self.bound(weights)
            bound = max(bound, tried, key=lambda candidate: candidate.value)
        shaker.offer(self.bound(bound.weights)[1], deadline)
        return bound

    def bound(self, weights: Floats) -> tuple[Bound, tuple[int, ...]]:
        """Return the bound of some weights, and the partition that attains it."""
        num_layers = self._problem.num_layers
        num_stages = self._problem.num_stages
        to_go = np.full((num_stages + 1, num_layers + 1), np.inf)
        to_go[num_stages, num_layers] = 0.0
        ends = []
        for stage in range(num_stages - 1, -1, -1):
            (first, last), (low, high) = self._windows[stage], self._windows[stage + 1]
            part, total = run_block(self._windows, stage, 0.0)
            for weight, term in zip(weights, self.terms, strict=True):
                for named, table in term.tables if weight else ():
                    if named == stage:
                        total += weight * table[part]
            total += to_go[stage + 1, low : high + 1]
            place = np.argmin(total, axis=1)
            to_go[stage, first : last + 1] = total[np.arange(last - first + 1), place]
            ends.append(place + low)
        boundaries = [0]
        for stage, end in enumerate(ends[::-1]):
            boundaries.append(int(end[boundaries[-1] - self._windows[stage][0]]))
        pairs = zip(weights, self.terms, strict=True)
        offset = sum(
            float(weight) * term.limit
            for weight, term in pairs
            if term.limit is not None and weight
        )
        return Bound(float(to_go[0, 0]) - offset, weights, to_go, offset), tuple(boundaries)

    def bottleneck(self) -> float:
        """Return a lower bound of the cost.

        It assumes that the other stages on each stage's rank have their least cost.
        """
        read = valid(self._problem.num_layers)
        raised: list[list[tuple[Table, float]]] = [[] for _ in range(self._problem.num_stages)]
        for term in itertools.compress(self.terms, ~self.is_limit):
            floors = [float(np.where(read, table, np.inf).min()) for _, table in term.tables]
            for (stage, table), floor in zip(term.tables, floors, strict=True):
                raised[stage].append((table, sum(floors) - floor))

        def block(stage: int) -> Table:
            part, highest = run_block(self._windows, stage, -np.inf)
            for table, floor in raised[stage]:
                np.maximum(highest, table[part] + floor, out=highest)
            return highest

        return least_highest(map(block, range(self._problem.num_stages)))

    def _first_weights(self, start: Sequence[int]) -> Floats:
        """Return equal weights for each rank's most expensive moment, and 0 for limits."""
        weights = np.zeros(len(self.terms))
        index = 0
        for rank in self._problem.ranks:
            costs = [term.at(start) for term in self.terms[index : index + len(rank.moments)]]
            weights[index + int(np.argmax(costs))] = 1.0 / len(self._problem.ranks)
            index += len(rank.moments)
        return weights

    def _moved(self, weights: Floats, path: Sequence[int], cost: float, gap: float) -> Floats:
        """Return the weights after one ascent step that aims to close `gap`.

        Limits are scaled to `cost`.
        """
        limits = np.array([term.limit or 1.0 for term in self.terms])
        factor = np.where(self.is_limit, cost / limits, 1.0)
        slope = np.array([term.at(path) for term in self.terms]) * factor
        slope -= np.where(self.is_limit, cost, slope[~self.is_limit].mean())
        slope[self.is_limit & (slope < 0) & (weights == 0)] = 0.0
        length = float(slope @ slope)
        if length == 0 or not np.isfinite(length):
            return weights
        moved = weights / factor + slope * (gap / length)
        on_simplex = _on_simplex(moved, ~self.is_limit)
        return np.where(self.is_limit, np.maximum(moved, 0.0) * factor, on_simplex)


def _on_simplex(values: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Return the nearest non-negative point with sum 1 to the chosen values (Held et al. 1974)."""
    falling = np.sort(values[chosen])[::-1]
    excess = (np.cumsum(falling) - 1.0) / np.arange(1, len(falling) + 1)
    last = int(np.flatnonzero(falling > excess)[-1])
    nearest: Floats = np.maximum(values - excess[last], 0.0)
    return nearest


SHAKEN = 0.5  # share of the boundaries


class Shaker:
    """The best partition so far.

    Every offered partition is improved by `resettle`; the best one is shaken and improved again.
    Random moves use a fixed seed; their number depends on the time.
    """

    def __init__(self, problem: Problem, start: Sequence[int], deadline: float) -> None:
        self._problem = problem
        self._random = random.Random(0)
        self.best = tuple(start)
        self.cost = problem.cost(start)
        self.offer(start, deadline)

    def offer(self, boundaries: Sequence[int], deadline: float) -> None:
        """Improve a partition until the deadline, and keep it if it is better than the best."""
        for candidate in (tuple(boundaries), resettle(self._problem, boundaries, deadline)):
            if self._problem.cost(candidate) < self.cost:
                self.best, self.cost = candidate, self._problem.cost(candidate)

    def shake(self, deadline: float) -> None:
        """Move half of the boundaries a little and improve the partition, until the deadline."""
        problem = self._problem
        draw = self._random
        reach = max(1, problem.num_layers // (2 * problem.num_stages))
        while time.perf_counter() < deadline:
            moved = list(self.best)
            for cut in range(1, problem.num_stages):
                if draw.random() < SHAKEN:
                    low = moved[cut - 1] + 1
                    high = moved[cut + 1] - 1
                    moved[cut] = draw.randint(
                        max(low, moved[cut] - reach), min(high, moved[cut] + reach)
                    )
            self.offer(moved, deadline)


def resettle(problem: Problem, boundaries: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Return a partition that no move of a run of stages improves.

    At the deadline (a time.perf_counter()), return the best one so far. The stages of a run are all
    on different ranks. So, with the other stages fixed, they are a chain, whose tables are
    increased by the cost of the other stages on their ranks; the move is then optimal.
    """
    best = tuple(boundaries)
    runs = independent_runs(problem)
    upcoming = itertools.cycle(runs)
    idle = 0
    while idle < len(runs) and time.perf_counter() < deadline:
        moved = _settled(problem, best, *next(upcoming))
        idle += 1
        if moved is not None and _rating(problem, moved) < _rating(problem, best):
            best = moved
            idle = 0
    return best


def independent_runs(problem: Problem) -> list[tuple[int, int]]:
    """Return the longest runs of two or more stages (first, end) that are on different ranks."""
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


def _rating(problem: Problem, boundaries: Sequence[int]) -> tuple[float, ...]:
    """Return the sort key of partitions: the costs of all ranks, the most expensive first."""
    if problem.cost(boundaries) == np.inf:
        return (np.inf,)
    return tuple(sorted((rank.under(boundaries) for rank in problem.ranks), reverse=True))


def _settled(
    problem: Problem, boundaries: Sequence[int], first: int, end: int
) -> tuple[int, ...] | None:
    low = boundaries[first]
    high = boundaries[end]
    part = (slice(low, high), slice(low, high + 1))

    def raised(ranks: Sequence[RankCosts]) -> tuple[RankCosts, ...]:
        """Return the costs of the run's stages as a chain, plus the other costs on their ranks."""
        costs = []
        for rank in ranks:
            spans = rank.spans(boundaries)
            for place, stage in enumerate(rank.stages):
                if first <= stage < end:
                    moments = []
                    for tables in rank.moments:
                        pairs = enumerate(zip(tables, spans, strict=True))
                        rest = sum(float(table()[span]) for k, (table, span) in pairs if k != place)
                        moments.append(tables[place]()[part] + rest)
                    highest = np.maximum.reduce(moments)
                    costs.append(RankCosts((stage - first,), ((partial(np.asarray, highest),),)))
        return tuple(costs)

    crossing = problem.boundary_bytes[low : high - 1]
    ranks = raised(problem.ranks)
    limits = raised(problem.limits)
    inside = partition_chain(
        Problem(high - low, end - first, ranks, crossing, limits, problem.limit)
    )
    if inside is None:
        return None
    return (*boundaries[:first], *(low + cut for cut in inside), *boundaries[end + 1 :])

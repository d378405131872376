"""Local search: a cut bettered by moving one boundary at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gems.partition.problem import Problem

Order = tuple[tuple[float, ...], int]


def improve(problem: Problem, boundaries: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Return a cut that no move of one boundary by one layer betters, or the best one when the deadline comes first.

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
    """A cut with the costs of its ranks, of which a move changes a few."""

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
        """Move a boundary if that betters the cut, and tells whether it did."""
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

"""A chain, in which every rank has one stage.

The solver returns the partition with the least highest cost; it is exact for any tables.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gems.partition.problem import Problem
from gems.partition.solvers.tables import Floats, problem_terms, run_block, widest
from gems.profile.spans import Table


class Chain:
    """The tables of each stage of a chain, each with its limit, or None if part of the cost."""

    def __init__(self, problem: Problem) -> None:
        self.num_layers = problem.num_layers
        self.num_stages = problem.num_stages
        self.crossing = problem.crossing
        self.widest = widest(problem)
        self._tables: list[list[tuple[Table, float | None]]] = [
            [] for _ in range(problem.num_stages)
        ]
        for term in problem_terms(problem):
            ((stage, table),) = term.tables
            self._tables[stage].append((table, term.limit))

    def block(self, stage: int) -> Table:
        """Return the cost of a stage for each begin and end, infinite if it is not allowed."""
        part, cost = run_block(self.widest, stage, -np.inf)
        for table, limit in self._tables[stage]:
            if limit is None:
                np.maximum(cost, table[part], out=cost)
            else:
                cost[table[part] > limit] = np.inf
        return cost


def partition_chain(problem: Problem) -> tuple[int, ...] | None:
    """Return boundaries of the least cost and, among those, with the fewest crossing bytes.

    Return None if the limits allow no partition. A dynamic program over stages and ends finds the
    least cost, with S L^2 entries in total. A second one, over the entries that are not more
    expensive, breaks ties. Both are exact for any tables.
    """
    chain = Chain(problem)
    highest = least_cost(chain)
    return None if np.isinf(highest) else _fewest_bytes(chain, highest)


def least_cost(chain: Chain) -> float:
    """Return the least cost of a chain by the dynamic program.

    It is infinite if the limits allow no partition.
    """
    return least_highest(map(chain.block, range(chain.num_stages)))


def least_highest(blocks: Iterable[Table]) -> float:
    """Return the least highest cost of consecutive stages; each block has costs by begin and end.

    The blocks are consumed.
    """
    best: Floats = np.array([-np.inf])
    for block in blocks:
        best = np.maximum(block, best[:, None], out=block).min(axis=0)
    return float(best[0])


def _fewest_bytes(chain: Chain, most: float) -> tuple[int, ...]:
    """Return the partition with the fewest crossing bytes whose stages cost at most `most` each."""
    fewest: Floats = np.zeros(1)
    begins = []
    for stage, (low, high) in enumerate(chain.widest[1:]):
        reached = np.where(chain.block(stage) <= most, fewest[:, None], np.inf)
        begins.append(reached.argmin(axis=0) + chain.widest[stage][0])
        fewest = reached.min(axis=0) + chain.crossing[low : high + 1]
    boundaries = [chain.num_layers]
    for begin, (low, _) in zip(begins[::-1], chain.widest[:0:-1], strict=True):
        boundaries.append(int(begin[boundaries[-1] - low]))
    return tuple(boundaries[::-1])

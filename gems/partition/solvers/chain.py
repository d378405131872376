"""A chain: every rank holds one stage. The partition of the least highest cost, exact for any tables."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems.partition.problem import Problem
from gems.partition.solvers.tables import is_monotone
from gems.profile.spans import Table

Windows = Sequence[tuple[int, int]]
SMALL = 150  # layers up to which the dynamic program is the quicker one whatever the tables
INFINITE_BITS = struct.unpack("<q", struct.pack("<d", float("inf")))[0]


class Chain:
    """The tables of each stage of a chain: judged, and limited."""

    def __init__(self, problem: Problem) -> None:
        self.num_layers = problem.num_layers
        self.num_stages = problem.num_stages
        self._limit = problem.limit
        self._costs: list[list[Table]] = [[] for _ in range(problem.num_stages)]
        self._limits: list[list[Table]] = [[] for _ in range(problem.num_stages)]
        for ranks, chosen in ((problem.ranks, self._costs), (problem.limits, self._limits)):
            for rank in ranks:
                chosen[rank.stages[0]] += [table() for (table,) in rank.moments]
        self.widest = [(s, self.num_layers - self.num_stages + s) for s in range(self.num_stages + 1)]
        self.widest[0], self.widest[-1] = (0, 0), (self.num_layers, self.num_layers)

    def block(self, stage: int, windows: Windows) -> Table:
        """Return the cost of a stage that begins and ends within its windows; infinite if it may not."""
        (first, last), (low, high) = windows[stage], windows[stage + 1]
        part = (slice(first, last + 1), slice(low, high + 1))
        found = np.where(np.arange(low, high + 1)[None, :] > np.arange(first, last + 1)[:, None], -np.inf, np.inf)
        for table in self._costs[stage]:
            np.maximum(found, table[part], out=found)
        for table in self._limits[stage]:
            found[table[part] > self._limit] = np.inf
        return found

    def is_monotone(self) -> bool:
        """Return whether every table is monotone."""
        tables = {id(table): table for lists in (self._costs, self._limits) for row in lists for table in row}
        return all(map(is_monotone, tables.values()))

    def furthest(self, stage: int, first: int, most: float) -> int:
        """Return how far a stage from `first` on may go for `most`, of monotone tables; `first` if nowhere."""
        end = self.num_layers
        for tables, cap in ((self._costs[stage], most), (self._limits[stage], self._limit)):
            for table in tables:
                end = min(end, first + int(np.searchsorted(table[first, first + 1 :], cap, side="right")))
        return end

    def nearest(self, stage: int, end: int, most: float) -> int:
        """Return how early a stage up to `end` may begin for `most`, of monotone tables; `end` if nowhere."""
        first = 0
        for tables, cap in ((self._costs[stage], most), (self._limits[stage], self._limit)):
            for table in tables:
                upward = table[:end, end][::-1]
                first = max(first, end - int(np.searchsorted(upward, cap, side="right")))
        return first


def partition_chain(problem: Problem) -> tuple[int, ...] | None:
    """Return boundaries of the least cost and, among those, the fewest bytes that cross; None if limits allow none.

    Of monotone tables the least cost comes from a search over floats, each judged by filling one stage after the other
    (stages without layers being allowed, which makes it a lower bound; it is the answer when a split into whole stages
    attains it). Of any tables it comes from a dynamic program over stages and ends, S L^2 entries in all. A second
    such program, over the entries that are not dearer, settles ties; both are exact.
    """
    chain = Chain(problem)
    if chain.num_layers > SMALL and chain.is_monotone():
        most = _least_filled(chain)
        if most is not None:
            found = _fewest_bytes(chain, problem.boundary_bytes, most, _windows(chain, most))
            if found is not None:
                return found
    highest = _least_highest(chain)
    if np.isinf(highest):
        return None
    return _fewest_bytes(chain, problem.boundary_bytes, highest, chain.widest)


def least_cost(problem: Problem) -> float:
    """Return the least cost of a chain by the dynamic program; infinite if limits allow no partition."""
    return _least_highest(Chain(problem))


def _least_highest(chain: Chain) -> float:
    best: NDArray[np.float64] = np.array([-np.inf])
    for stage in range(chain.num_stages):
        block = chain.block(stage, chain.widest)
        best = np.maximum(block, best[:, None], out=block).min(axis=0)
    return float(best[0])


def _least_filled(chain: Chain) -> float | None:
    """Return the least float at which filling reaches the last layer; None when none does.

    Floats from 0 up are in the order of their bits, so that a search over those ends at the float itself.
    """
    low, high = -1, INFINITE_BITS
    if not _fills(chain, float("inf")):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fills(chain, _float(middle)):
            high = middle
        else:
            low = middle
    return _float(high)


def _float(bits: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found


def _fills(chain: Chain, most: float) -> bool:
    end = 0
    for stage in range(chain.num_stages):
        if end < chain.num_layers:
            end = chain.furthest(stage, end, most)
    return end == chain.num_layers


def _windows(chain: Chain, most: float) -> Windows:
    """Return the least and largest place of every boundary, by filling from the right and from the left."""
    least, largest = [chain.num_layers], [0]
    for stage in range(chain.num_stages):
        first = largest[-1]
        largest.append(chain.furthest(stage, first, most) if first < chain.num_layers else first)
        end = least[-1]
        least.append(chain.nearest(chain.num_stages - 1 - stage, end, most) if end else 0)
    return [
        (max(low, lowest), min(high, highest))
        for low, high, (lowest, highest) in zip(least[::-1], largest, chain.widest, strict=True)
    ]


def _fewest_bytes(chain: Chain, boundary_bytes: Sequence[int], most: float, windows: Windows) -> tuple[int, ...] | None:
    """Return the partition of the fewest crossing bytes whose stages cost `most` at most each."""
    if any(low > high for low, high in windows):
        return None
    crossing = np.concatenate(([0.0], boundary_bytes, [0.0]))
    bytes_to: list[NDArray[np.float64]] = [np.zeros(1)]
    for stage in range(chain.num_stages):
        low, high = windows[stage + 1]
        allowed = chain.block(stage, windows) <= most
        reached = np.where(allowed, bytes_to[-1][:, None], np.inf).min(axis=0)
        bytes_to.append(reached + crossing[low : high + 1])
    if np.isinf(bytes_to[-1][0]):
        return None
    boundaries = [chain.num_layers]
    for stage in range(chain.num_stages - 1, -1, -1):
        column = (windows[stage], (boundaries[-1], boundaries[-1]))
        whole = [*windows[:stage], *column, *windows[stage + 2 :]]
        allowed = chain.block(stage, whole)[:, 0] <= most
        best = int(np.argmin(np.where(allowed, bytes_to[stage], np.inf)))
        boundaries.append(windows[stage][0] + best)
    return tuple(boundaries[::-1])

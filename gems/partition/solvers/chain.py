"""A chain, in which every rank has one stage.

The solver returns the partition with the least highest cost; it is exact for any tables.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from gems.partition.problem import Problem
from gems.partition.solvers.tables import Floats, Windows, is_monotone, run_block, terms_of, widest
from gems.profile.spans import Table

# up to this number of layers, the dynamic program is faster for any tables
SMALL = 150
INFINITE_BITS = struct.unpack("<q", struct.pack("<d", float("inf")))[0]


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
        for term in terms_of(problem):
            ((stage, table),) = term.tables
            self._tables[stage].append((table, term.limit))

    def block(self, stage: int, windows: Windows) -> Table:
        """Return the cost of a stage for each begin and end within its windows.

        It is infinite if the stage is not allowed.
        """
        part, cost = run_block(windows, stage, -np.inf)
        for table, limit in self._tables[stage]:
            if limit is None:
                np.maximum(cost, table[part], out=cost)
            else:
                cost[table[part] > limit] = np.inf
        return cost

    def is_monotone(self) -> bool:
        """Return whether every table is monotone."""
        return all(
            map(
                is_monotone, {id(table): table for row in self._tables for table, _ in row}.values()
            )
        )

    def furthest(self, stage: int, first: int, most: float) -> int:
        """Return the last end of a stage that begins at `first` and costs at most `most`.

        The tables must be monotone. It is `first` if no end is possible.
        """
        end = self.num_layers
        for table, limit in self._tables[stage]:
            cap = most if limit is None else limit
            end = min(
                end, first + int(np.searchsorted(table[first, first + 1 :], cap, side="right"))
            )
        return end

    def nearest(self, stage: int, end: int, most: float) -> int:
        """Return the first begin of a stage that ends at `end` and costs at most `most`.

        The tables must be monotone. It is `end` if no begin is possible.
        """
        first = 0
        for table, limit in self._tables[stage]:
            cap = most if limit is None else limit
            first = max(
                first, end - int(np.searchsorted(table[:end, end][::-1], cap, side="right"))
            )
        return first


def partition_chain(problem: Problem) -> tuple[int, ...] | None:
    """Return boundaries of the least cost and, among those, with the fewest crossing bytes.

    Return None if the limits allow no partition. For monotone tables, the least cost is found by a
    search over floats. Each float is tested by filling one stage after the other; stages without
    layers are allowed, which makes the result a lower bound. It is the answer if a split into
    non-empty stages attains it. For other tables, a dynamic program over stages and ends finds the
    least cost, with S L^2 entries in total. A second such program, over the entries that are not
    more expensive, breaks ties. Both are exact.
    """
    chain = Chain(problem)
    if chain.num_layers > SMALL and chain.is_monotone():
        most = _least_filled(chain)
        if most is not None:
            boundaries = _fewest_bytes(chain, most, _windows(chain, most))
            if boundaries is not None:
                return boundaries
    highest = least_cost(chain)
    return None if np.isinf(highest) else _fewest_bytes(chain, highest, chain.widest)


def least_cost(chain: Chain) -> float:
    """Return the least cost of a chain by the dynamic program.

    It is infinite if the limits allow no partition.
    """
    return least_highest(chain.block(stage, chain.widest) for stage in range(chain.num_stages))


def least_highest(blocks: Iterable[Table]) -> float:
    """Return the least highest cost of consecutive stages; each block has costs by begin and end.

    The blocks are consumed.
    """
    best: Floats = np.array([-np.inf])
    for block in blocks:
        best = np.maximum(block, best[:, None], out=block).min(axis=0)
    return float(best[0])


def _least_filled(chain: Chain) -> float | None:
    """Return the least float at which filling reaches the last layer, or None if there is none.

    Non-negative floats have the order of their bits, so a search over the bits finds the exact
    float.
    """
    if not _fills(chain, float("inf")):
        return None
    return _float(
        bisect_left(range(INFINITE_BITS), True, key=lambda bits: _fills(chain, _float(bits)))
    )


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _fills(chain: Chain, most: float) -> bool:
    end = 0
    for stage in range(chain.num_stages):
        if end < chain.num_layers:
            end = chain.furthest(stage, end, most)
    return end == chain.num_layers


def _windows(chain: Chain, most: float) -> Windows:
    """Return the smallest and largest position of every boundary, by filling from both sides."""
    least = [chain.num_layers]
    largest = [0]
    for stage in range(chain.num_stages):
        first = largest[-1]
        end = least[-1]
        largest.append(chain.furthest(stage, first, most) if first < chain.num_layers else first)
        least.append(chain.nearest(chain.num_stages - 1 - stage, end, most) if end else 0)
    return [
        (max(low, lowest), min(high, highest))
        for low, high, (lowest, highest) in zip(least[::-1], largest, chain.widest, strict=True)
    ]


def _fewest_bytes(chain: Chain, most: float, windows: Windows) -> tuple[int, ...] | None:
    """Return the partition with the fewest crossing bytes whose stages cost at most `most` each."""
    if any(low > high for low, high in windows):
        return None
    bytes_to: list[Floats] = [np.zeros(1)]
    for stage in range(chain.num_stages):
        low, high = windows[stage + 1]
        allowed = chain.block(stage, windows) <= most
        reached = np.where(allowed, bytes_to[-1][:, None], np.inf).min(axis=0)
        bytes_to.append(reached + chain.crossing[low : high + 1])
    if np.isinf(bytes_to[-1][0]):
        return None
    boundaries = [chain.num_layers]
    for stage in range(chain.num_stages - 1, -1, -1):
        column = (windows[stage], (boundaries[-1], boundaries[-1]))
        allowed = (
            chain.block(stage, [*windows[:stage], *column, *windows[stage + 2 :]])[:, 0] <= most
        )
        best = int(np.argmin(np.where(allowed, bytes_to[stage], np.inf)))
        boundaries.append(windows[stage][0] + best)
    return tuple(boundaries[::-1])

"""Scaling efficiency of N data-parallel workers, SE_N = T_1 / T_N: measured, or taken as 1."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gems.errors import ConfigError
from gems.planner.hybrid.quantity import Quantity


class Efficiency(Protocol):
    """The step time of one worker over that of N, each with the batch that it has alone."""

    def of(self, workers: int, ways: int) -> float:
        """Return SE_N of workers of `ways` devices each; raises ConfigError where it is not known."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is uncertain."""

    def drawn(self, rng: np.random.Generator) -> Efficiency:
        """Return one draw from what is uncertain."""


@dataclass(frozen=True, slots=True)
class IdealEfficiency:
    """Workers that cost each other no time: what favours data parallelism most (Pal et al. 2019, their projections)."""

    def of(self, workers: int, ways: int) -> float:
        """Return 1."""
        return 1.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing is uncertain."""
        return True

    def drawn(self, rng: np.random.Generator) -> IdealEfficiency:
        """Return itself."""
        return self


@dataclass(frozen=True, slots=True)
class EfficiencyTable:
    """SE_N by the devices of a worker and the number of workers; between two numbers, linear in the logarithm of N.

    Workers of more devices than any in the table are taken to lose what those of the nearest smaller size lose, as
    Pal et al. do, who use one SE_N for both.
    """

    by_ways: Mapping[int, Mapping[int, Quantity]]

    def __post_init__(self) -> None:
        if not self.by_ways or not all(self.by_ways.values()):
            raise ValueError("must have at least one row")

    def of(self, workers: int, ways: int) -> float:
        """Return SE_N.

        Raises:
            ConfigError: fewer or more workers than in the table; one worker alone has 1 where the table begins above.
        """
        sizes = sorted(self.by_ways)
        table = self.by_ways[sizes[max(0, bisect_right(sizes, ways) - 1)]]
        known = sorted(table)
        if workers == 1 and known[0] > 1:
            return 1.0
        if not known[0] <= workers <= known[-1]:
            raise ConfigError(
                "workers", workers, f"the scaling efficiency is known from {known[0]} to {known[-1]} workers",
                "measure more of them, or leave --efficiency out to model it",
            )  # fmt: skip
        right = min(bisect_right(known, workers), len(known) - 1)
        low, high = known[max(0, right - 1)], known[right]
        if low == high:
            return table[low].value
        share = math.log(workers / low) / math.log(high / low)
        return table[low].value + share * (table[high].value - table[low].value)

    @property
    def is_exact(self) -> bool:
        """Whether no figure has an interval."""
        return all(each.is_exact for table in self.by_ways.values() for each in table.values())

    def drawn(self, rng: np.random.Generator) -> EfficiencyTable:
        """Return a table with each figure drawn from its interval, independently."""
        return EfficiencyTable(
            {
                ways: {workers: each.drawn(rng) for workers, each in table.items()}
                for ways, table in self.by_ways.items()
            }
        )

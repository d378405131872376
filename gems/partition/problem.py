"""The partition problem: the tables that rate a partition, and the solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.profile.spans import RankCosts


class InfeasibleError(ValueError):
    """The error that no partition keeps the limits, as far as the search can tell.

    `least` is the cost of the best partition by the limits alone, that is, the limit that this
    partition needs. `bound` is a lower bound of the limit that any partition needs; if it is not
    above the limit, the search ended without a proof.
    """

    def __init__(self, least: float, limit: float, bound: float) -> None:
        super().__init__(least, limit, bound)
        self.least = least
        self.limit = limit
        self.bound = bound

    def __str__(self) -> str:
        needs = f"the best one needs {self.least:g}, and none less than {self.bound:g}"
        return f"no partition within {self.limit:g}: {needs}"


@dataclass(frozen=True)
class Problem:
    """The problem of partitioning layers into stages so that the most expensive rank costs least.

    There are `num_layers` layers and `num_stages` stages. `ranks` has one entry for each group of
    stages that is rated together; several ranks with the same stages share an entry. With `limits`,
    a partition is allowed only if no rank's cost there exceeds `limit`. `boundary_bytes[b]` is the
    size of the tensors between layers b and b + 1, which breaks ties.
    """

    num_layers: int
    num_stages: int
    ranks: tuple[RankCosts, ...]
    boundary_bytes: tuple[int, ...]
    limits: tuple[RankCosts, ...] = ()
    limit: float = float("inf")

    def cost(self, boundaries: Sequence[int]) -> float:
        """Return the cost of the most expensive rank; infinite if a limit is broken."""
        if any(rank.under(boundaries) > self.limit for rank in self.limits):
            return float("inf")
        return max(rank.under(boundaries) for rank in self.ranks)

    @cached_property
    def crossing(self) -> NDArray[np.float64]:
        """The bytes that cross a boundary before each layer, and 0 at both ends."""
        return np.concatenate(([0.0], self.boundary_bytes, [0.0]))

    def crossing_bytes(self, boundaries: Sequence[int]) -> int:
        """Return the total bytes of all boundaries."""
        return sum(self.boundary_bytes[cut - 1] for cut in boundaries[1:-1])

    @cached_property
    def is_chain(self) -> bool:
        """Whether every rank holds one stage."""
        return all(len(rank.stages) == 1 for rank in (*self.ranks, *self.limits))

    @cached_property
    def is_paired(self) -> bool:
        """Whether every rank holds stages s and S-1-s: GEMS's two directions, or a V."""
        last = self.num_stages - 1
        return all(
            set(rank.stages) <= {stage, last - stage}
            for rank in (*self.ranks, *self.limits)
            for stage in rank.stages[:1]
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a search: boundaries, or None if no partition keeps the limits, and their cost.

    `bound` is a lower bound of every partition's cost. `is_proven` means that nothing better
    exists, and `has_fewest_bytes` that no partition of this cost has fewer crossing bytes.
    """

    boundaries: tuple[int, ...] | None
    cost: float
    bound: float
    is_proven: bool
    has_fewest_bytes: bool = False


@dataclass(frozen=True, slots=True)
class Partition:
    """An answer: stage s consists of layers boundaries[s] up to boundaries[s + 1].

    `bound` is at most the cost of any partition; `is_optimal` means that `cost` is the minimum.
    `facts` is additional information from the method.
    """

    method: str
    boundaries: tuple[int, ...]
    cost: float
    bound: float
    is_optimal: bool
    solve_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How much the cost may exceed the minimum, as a share of the bound."""
        return 0.0 if self.is_optimal or self.bound <= 0 else self.cost / self.bound - 1

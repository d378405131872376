"""A mixed-integer linear program under construction, in bytes and seconds scaled to like sizes, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gems.utils.stdio import stdout_to_stderr

Terms = dict[int, float]
TOLERANCE = 1e-6  # by how much a row may be off, in scaled units, and with it the bound
UNITS = 1000.0


@dataclass(frozen=True, slots=True)
class Solution:
    """The values of all variables, the objective and a proven bound below the least one, both in scaled units.

    `values` is None if no whole solution was found.
    """

    values: NDArray[np.float64] | None
    objective: float
    bound: float
    is_optimal: bool


class Program:
    """Variables, rows and an objective to make least; `bytes_scale` and `s_scale` become 1000 units."""

    def __init__(self, bytes_scale: float, s_scale: float) -> None:
        self._per_byte, self._per_s = UNITS / bytes_scale, UNITS / s_scale
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[int] = []
        self._cost: Terms = {}
        self._rows: list[tuple[Mapping[int, float], float, float]] = []

    @property
    def num_variables(self) -> int:
        """How many variables there are so far."""
        return len(self._low)

    def scaled_bytes(self, num_bytes: float) -> float:
        """Return bytes in units of the MILP."""
        return num_bytes * self._per_byte

    def scaled_s(self, seconds: float) -> float:
        """Return seconds in units of the MILP."""
        return seconds * self._per_s

    def seconds(self, scaled: float) -> float:
        """Return scaled time in seconds."""
        return scaled / self._per_s

    def rate(self, bytes_per_s: float) -> float:
        """Return a rate in units of bytes over units of time."""
        return bytes_per_s * self._per_byte / self._per_s

    def variable(self, low: float = 0.0, high: float = np.inf, is_whole: bool = False) -> int:
        """Make a variable and return its number."""
        self._low.append(low)
        self._high.append(high)
        self._whole.append(int(is_whole))
        return len(self._low) - 1

    def row(self, terms: Mapping[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        """Hold a sum between two values."""
        self._rows.append((terms, low, high))

    def minimise(self, terms: Terms) -> None:
        """Set what is made least."""
        self._cost = dict(terms)

    def solve(self, is_whole: bool, node_limit: int = 0, gap: float = 0.0) -> Solution | None:
        """Solve the MILP, or its relaxation; None if it has no solution. Work is bounded in nodes, not seconds."""
        # here, because a login node plans without it where the policy asks for no MILP
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        cost = np.zeros(self.num_variables)
        for variable, factor in self._cost.items():
            cost[variable] = factor
        columns: list[int] = []
        factors: list[float] = []
        starts = [0]
        for terms, _, _ in self._rows:
            columns.extend(terms.keys())
            factors.extend(terms.values())
            starts.append(len(columns))
        matrix = csr_array((factors, columns, starts), shape=(len(self._rows), self.num_variables))
        lows, highs = ([row[side] for row in self._rows] for side in (1, 2))
        with stdout_to_stderr():
            found = milp(
                cost,
                integrality=np.array(self._whole) if is_whole else None,
                bounds=Bounds(np.array(self._low), np.array(self._high)),
                constraints=LinearConstraint(matrix, lows, highs),
                options={"node_limit": node_limit, "mip_rel_gap": gap} if is_whole else {},
            )
        if found.status == 2:
            return None
        bound = float(found.mip_dual_bound) if is_whole and found.mip_dual_bound is not None else None
        objective = float(found.fun) if found.fun is not None else np.inf
        if bound is None:
            bound = objective if found.status == 0 else -np.inf
        return Solution(found.x, objective, bound - TOLERANCE * max(1.0, abs(bound)), found.status == 0)

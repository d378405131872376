"""A mixed-integer linear program under construction, scaled evenly and solved by HiGHS.

Its quantities are bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gems.utils.stdio import stdout_to_stderr

TOLERANCE = 1e-6  # by how much a constraint may be off, in scaled units, and with it the bound
UNITS = 1000.0


class LinearSum(dict[int, float]):
    """A linear expression: the factor of each variable."""

    def __add__(self, other: Mapping[int, float]) -> LinearSum:
        small, large = (self, other) if len(self) < len(other) else (other, self)
        found = LinearSum(large)
        found += small
        return found

    def __iadd__(self, other: Mapping[int, float]) -> LinearSum:
        for variable, factor in other.items():
            self[variable] = self[variable] + factor if variable in self else factor
        return self

    def __sub__(self, other: Mapping[int, float]) -> LinearSum:
        found = LinearSum(self)
        for variable, factor in other.items():
            found[variable] = found[variable] - factor if variable in found else -factor
        return found

    def __mul__(self, factor: float) -> LinearSum:
        return LinearSum({variable: factor * value for variable, value in self.items()})


class Solution(NamedTuple):
    """The values of all variables, and a bound proven below the least objective, in scaled units."""

    values: NDArray[np.float64] | None  # None if no whole solution was found
    bound: float


class Program:
    """Variables, constraints and a cost to be minimised; `bytes_scale` and `s_scale` become 1000 units.

    Multiply bytes by `per_byte` and seconds by `per_s` to scale them.
    """

    def __init__(self, bytes_scale: float, s_scale: float) -> None:
        self.per_byte, self.per_s = UNITS / bytes_scale, UNITS / s_scale
        self.cost = LinearSum()
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[int] = []
        self._constraints: list[tuple[Mapping[int, float], float, float]] = []

    @property
    def num_variables(self) -> int:
        """How many variables there are so far."""
        return len(self._low)

    def variable(self, high: float = np.inf, is_whole: bool = False) -> int:
        """Make a variable of at least 0 and return its number."""
        self._low.append(0.0)
        self._high.append(high)
        self._whole.append(int(is_whole))
        return len(self._low) - 1

    def constrain(
        self, terms: Mapping[int, float], low: float = -np.inf, high: float = np.inf
    ) -> None:
        """Constrain a sum to lie between two values."""
        self._constraints.append((terms, low, high))

    def solve(self, is_whole: bool, node_limit: int = 0, gap: float = 0.0) -> Solution | None:
        """Solve the MILP, or its relaxation; None if it has no solution.

        Work is bounded in nodes, not seconds.
        """
        # here, because a login node plans without it where the policy asks for no MILP
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        cost = np.zeros(self.num_variables)
        for variable, factor in self.cost.items():
            cost[variable] = factor
        columns: list[int] = []
        factors: list[float] = []
        starts = [0]
        for terms, _, _ in self._constraints:
            columns.extend(terms.keys())
            factors.extend(terms.values())
            starts.append(len(columns))
        matrix = csr_array(
            (factors, columns, starts), shape=(len(self._constraints), self.num_variables)
        )
        lows, highs = ([constraint[side] for constraint in self._constraints] for side in (1, 2))
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
        bound = found.mip_dual_bound if is_whole else None
        if bound is None:
            bound = found.fun if found.status == 0 and found.fun is not None else -np.inf
        return Solution(found.x, bound - TOLERANCE * max(1.0, abs(bound)))

"""A mixed-integer linear program in bytes and seconds, scaled evenly and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gems.utils.stdio import stdout_to_stderr

TOLERANCE = 1e-6  # of constraints and of the bound, in scaled units
UNITS = 1000.0


class LinearSum(dict[int, float]):
    """A linear expression: the factor of each variable."""

    def __add__(self, other: Mapping[int, float]) -> LinearSum:
        small, large = (self, other) if len(self) < len(other) else (other, self)
        total = LinearSum(large)
        total += small
        return total

    def __iadd__(self, other: Mapping[int, float]) -> LinearSum:
        for variable, factor in other.items():
            self[variable] = self.get(variable, 0.0) + factor
        return self

    def __sub__(self, other: Mapping[int, float]) -> LinearSum:
        difference = LinearSum(self)
        difference += {variable: -factor for variable, factor in other.items()}
        return difference

    def __mul__(self, factor: float) -> LinearSum:
        return LinearSum({variable: factor * value for variable, value in self.items()})


class Solution(NamedTuple):
    """The values of all variables, and a lower bound of the objective, in scaled units."""

    values: NDArray[np.float64] | None  # None if no integer solution was found
    bound: float


class Program:
    """Variables, constraints and a cost to be minimized.

    Multiply bytes by `per_byte` and seconds by `per_s` to scale them; `bytes_scale` and `s_scale`
    become 1000 units.
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
        """The number of variables so far."""
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
        """Solve the MILP, or its relaxation; return None if it has no solution.

        Work is limited in nodes, not in seconds.
        """
        # imported here, because policies without a MILP plan on a login node
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
            result = milp(
                cost,
                integrality=np.array(self._whole) if is_whole else None,
                bounds=Bounds(np.array(self._low), np.array(self._high)),
                constraints=LinearConstraint(matrix, lows, highs),
                options={"node_limit": node_limit, "mip_rel_gap": gap} if is_whole else {},
            )
        if result.status == 2:
            return None
        bound = result.mip_dual_bound if is_whole else None
        if bound is None:
            bound = result.fun if result.status == 0 and result.fun is not None else -np.inf
        return Solution(result.x, bound - TOLERANCE * max(1.0, abs(bound)))

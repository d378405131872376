"""How long the exact partition of synthetic models takes, and how far it is proven: one line for each case.

Costs are those of real stages: 4 times the parameters, in flight times (the stash and the input of the first layer),
and the largest transient. Inputs vary so much that a stage may hold more without its first layer; the monotone cases
are without inputs. Tables are made before the clock starts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gems.partition.exact import solve
from gems.partition.problem import Problem
from gems.profile.spans import RankCosts
from gems.profile.spans import Table as CostTable
from scripts.bench.rig import Table, machine, parser

MAX_IN_FLIGHT = 8


class Model:
    """Tables (L, L + 1) of a model whose activations shrink by `decay` a layer while its parameters grow, in bytes."""

    def __init__(self, num_layers: int, decay: float, has_inputs: bool) -> None:
        rng = np.random.default_rng(0)
        sizes = np.floor(rng.integers(50, 2000, num_layers) * 1e6 * decay ** np.arange(num_layers))
        outputs = np.floor(sizes * rng.uniform(0.2, 2.5, num_layers))
        params = np.floor(rng.integers(1, 100, num_layers) * 1e5 * np.linspace(1, 20, num_layers))
        inputs = np.concatenate((sizes[:1], outputs[:-1])) if has_inputs else np.zeros(num_layers)
        transient = np.floor(sizes * rng.uniform(0.5, 2.0, num_layers))
        self.num_layers = num_layers
        self.boundary_bytes = tuple(int(size) for size in outputs[:-1])
        self.params = _sums(params)
        self.kept = _sums(sizes) + inputs[:, None]
        self.transient = np.zeros_like(self.params)
        for first in range(num_layers):
            self.transient[first, first + 1 :] = np.maximum.accumulate(transient[first:])

    def table(self, in_flight: int, is_active: bool) -> Callable[[], CostTable]:
        """Return the table of a stage."""
        made = 4 * self.params + in_flight * self.kept + (self.transient if is_active else 0.0)
        return lambda: made


@dataclass(frozen=True, slots=True)
class Case:
    """A line: how stages are placed on ranks, of how many layers, and with how many moments a rank."""

    name: str
    num_layers: int
    groups: tuple[tuple[int, ...], ...]
    num_moments: int
    has_inputs: bool = True
    decay: float = 1.0

    def problem(self) -> Problem:
        """Make the tables: at each moment another stage of a rank is active, and others are in flight."""
        model = Model(self.num_layers, self.decay, self.has_inputs)
        num_stages = 1 + max(stage for group in self.groups for stage in group)
        ranks = []
        for group in self.groups:
            moments = [
                tuple(
                    model.table(max(1, min(num_stages - stage, MAX_IN_FLIGHT) - moment), moment % len(group) == place)
                    for place, stage in enumerate(group)
                )
                for moment in range(self.num_moments)
            ]  # fmt: skip
            ranks.append(RankCosts(group, tuple(moments)))
        return Problem(self.num_layers, num_stages, tuple(ranks), model.boundary_bytes)


def chain(num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Place a stage on each rank."""
    return tuple((stage,) for stage in range(num_stages))


def pairs(num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Place stages s and S-1-s together."""
    return tuple((stage, num_stages - 1 - stage) for stage in range(num_stages // 2))


def looped(num_ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Place every num_ranks-th stage together."""
    return tuple(tuple(range(rank, num_ranks * chunks, num_ranks)) for rank in range(num_ranks))


CASES = (
    Case("chain, monotone", 1000, chain(128), 1, has_inputs=False),
    Case("chain, nearly monotone", 1000, chain(128), 1),
    Case("pairs, monotone", 1000, pairs(32), 3, has_inputs=False),
    Case("pairs, nearly monotone", 1000, pairs(32), 3),
    Case("pairs, nearly monotone, shrinking", 1000, pairs(32), 3, decay=0.997),
    Case("pairs, nearly monotone, 10 moments", 500, pairs(16), 10, decay=0.995),
    Case("looped, 4 ranks of 2", 40, looped(4, 2), 2, decay=0.99),
    Case("looped, 4 ranks of 4", 100, looped(4, 4), 2, decay=0.99),
    Case("looped, 8 ranks of 2", 100, looped(8, 2), 2, decay=0.99),
    Case("looped, 8 ranks of 4", 200, looped(8, 4), 2, decay=0.99),
)


def run_case(case: Case, budget_s: float) -> dict[str, Any]:
    """Solve one case and return its row."""
    problem = case.problem()
    begin = time.perf_counter()
    found = solve(problem, budget_s)
    return {
        "case": case.name, "layers": case.num_layers, "stages": problem.num_stages, "moments": case.num_moments,
        "solve_s": time.perf_counter() - begin, "cost_bytes": found.cost, "bound_bytes": found.bound,
        "gap": found.gap, "optimal": found.is_optimal, **found.facts,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Print a line for each case, or with --json one object."""
    options = parser(__doc__, "json", "only")
    options.add_argument("--budget-s", type=float, default=60.0, help="of the solver")
    given = options.parse_args(argv)
    machine()
    table = Table("case:<36", "L:6d", "S:5d", "s:8.2f", "GB:10.2f", "gap %:8.2f")
    rows = []
    for case in CASES:
        if given.only in case.name:
            row = run_case(case, given.budget_s)
            rows.append(row)
            proof = "proven" if row["optimal"] else 100 * row["gap"]
            table.row(case.name, row["layers"], row["stages"], row["solve_s"], row["cost_bytes"] / 1e9, proof)
    if given.json:
        print(json.dumps({"budget_s": given.budget_s, "cases": rows}))
    return 0


def _sums(values: np.ndarray) -> CostTable:
    total = np.concatenate(([0.0], np.cumsum(values)))
    table: CostTable = np.maximum(total[None, :] - total[:-1, None], 0.0)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

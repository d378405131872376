"""How long the exact partition of synthetic models takes, and how far it is proven.

One line for each case.
Costs are those of real stages: 4 times the parameters, in flight times (the stash and the input of
the first layer), and the largest transient. Inputs vary so much that a stage may hold more without
its first layer; the monotone cases are without inputs. Tables are made before the clock starts.
`--budget-s` is the solver's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gems.partition.exact import solve
from gems.partition.problem import Problem
from gems.profile.spans import RankCosts
from gems.profile.spans import Table as CostTable
from scripts.bench.rig import Table, answered, machine, options

MAX_IN_FLIGHT = 8
Groups = tuple[tuple[int, ...], ...]


def chain(num_stages: int) -> Groups:
    """Place a stage on each rank."""
    return tuple((stage,) for stage in range(num_stages))


def pairs(num_stages: int) -> Groups:
    """Place stages s and S-1-s together."""
    return tuple((stage, num_stages - 1 - stage) for stage in range(num_stages // 2))


def looped(num_ranks: int, chunks: int) -> Groups:
    """Place every num_ranks-th stage together."""
    return tuple(tuple(range(rank, num_ranks * chunks, num_ranks)) for rank in range(num_ranks))


# name, layers, stages on each rank, moments of a rank, whether inputs count, activations' decay a
# layer
CASES = (
    ("chain, monotone", 1000, chain(128), 1, False, 1.0),
    ("chain, nearly monotone", 1000, chain(128), 1, True, 1.0),
    ("pairs, monotone", 1000, pairs(32), 3, False, 1.0),
    ("pairs, nearly monotone", 1000, pairs(32), 3, True, 1.0),
    ("pairs, nearly monotone, shrinking", 1000, pairs(32), 3, True, 0.997),
    ("pairs, nearly monotone, 10 moments", 500, pairs(16), 10, True, 0.995),
    ("looped, 4 ranks of 2", 40, looped(4, 2), 2, True, 0.99),
    ("looped, 4 ranks of 4", 100, looped(4, 4), 2, True, 0.99),
    ("looped, 8 ranks of 2", 100, looped(8, 2), 2, True, 0.99),
    ("looped, 8 ranks of 4", 200, looped(8, 4), 2, True, 0.99),
)


def problem(
    num_layers: int, groups: Groups, num_moments: int, has_inputs: bool, decay: float
) -> Problem:
    """Make the tables (L, L + 1) of a model whose activations shrink while its parameters grow, in bytes.

    At each moment another stage of a rank is active, and others are in flight.
    """
    rng = np.random.default_rng(0)
    sizes = np.floor(rng.integers(50, 2000, num_layers) * 1e6 * decay ** np.arange(num_layers))
    outputs = np.floor(sizes * rng.uniform(0.2, 2.5, num_layers))
    params = _sums(
        np.floor(rng.integers(1, 100, num_layers) * 1e5 * np.linspace(1, 20, num_layers))
    )
    inputs = np.concatenate((sizes[:1], outputs[:-1])) if has_inputs else np.zeros(num_layers)
    transient = np.floor(sizes * rng.uniform(0.5, 2.0, num_layers))
    kept = _sums(sizes) + inputs[:, None]
    active = np.zeros_like(params)
    for first in range(num_layers):
        active[first, first + 1 :] = np.maximum.accumulate(transient[first:])

    def table(in_flight: int, is_active: bool) -> Callable[[], CostTable]:
        made = 4 * params + in_flight * kept + (active if is_active else 0.0)
        return lambda: made

    num_stages = 1 + max(stage for group in groups for stage in group)
    ranks = []
    for group in groups:
        moments = [
            tuple(
                table(
                    max(1, min(num_stages - stage, MAX_IN_FLIGHT) - moment),
                    moment % len(group) == place,
                )
                for place, stage in enumerate(group)
            )
            for moment in range(num_moments)
        ]
        ranks.append(RankCosts(group, tuple(moments)))
    return Problem(num_layers, num_stages, tuple(ranks), tuple(int(size) for size in outputs[:-1]))


def _sums(values: np.ndarray) -> CostTable:
    total = np.concatenate(([0.0], np.cumsum(values)))
    table: CostTable = np.maximum(total[None, :] - total[:-1, None], 0.0)
    return table


def _run_case(
    budget_s: float, name: str, num_layers: int, groups: Groups, num_moments: int, *more: Any
) -> dict[str, Any]:
    asked = problem(num_layers, groups, num_moments, *more)
    begin = time.perf_counter()
    cut = solve(asked, budget_s)
    solve_s = time.perf_counter() - begin
    return {
        "case": name,
        "layers": num_layers,
        "stages": asked.num_stages,
        "moments": num_moments,
        "solve_s": solve_s,
        "cost_bytes": cut.cost,
        "bound_bytes": cut.bound,
        "gap": cut.gap,
        "optimal": cut.is_optimal,
        **cut.facts,
    }


def main(argv: list[str]) -> int:
    """Print a line for each case, or with --json one object."""
    given = options(__doc__, argv, json=False, only="", budget_s=60.0)
    machine()
    table = Table(
        "case:<36",
        "L=layers:6d",
        "S=stages:5d",
        "s=solve_s:8.2f",
        "GB=cost_bytes:10.2f",
        "gap %=gap:8.2f",
    )
    rows = table.rows(
        (_run_case(given.budget_s, *case) for case in CASES if given.only in case[0]),
        lambda row: "proven" if row["optimal"] else "",
    )
    return answered({"budget_s": given.budget_s, "cases": rows}, False, given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Placement of operators on devices.

Each subgraph alone, or the whole graph if a limit on bytes couples them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gems.errors import ConfigError, DoesNotFitError
from gems.partition.dlplacer import cp_sat, milp
from gems.partition.dlplacer.devices import Devices, TimedPlacement
from gems.partition.dlplacer.heft import heft
from gems.partition.dlplacer.subgraphs import joined, span_bound_s, split_at_cut_vertices
from gems.profile.operator_graph import OpGraph

METHODS = ("auto", "cp_sat", "milp", "heft")
TOLERANCE = 2e-5  # times are rounded to 1e-6 of a step, on as many operators as a way has
HELP = "use more devices, a smaller micro-batch, or partitions of a pipeline"
# From a graph, devices, a known placement and seconds to a placement, if any, and a time that none
# is below.
Solver = Callable[[OpGraph, Devices, TimedPlacement, float], tuple[TimedPlacement | None, float]]


@dataclass(frozen=True, slots=True)
class Placement:
    """The answer: a placement in time, a bound that no placement is below, and how it was found."""

    graph: OpGraph
    devices: Devices
    timed: TimedPlacement
    bound_s: float
    method: str
    num_pieces: int
    solve_s: float

    @property
    def gap(self) -> float:
        """How far the step may be above the shortest, as a share of the bound."""
        return self.timed.span_s / self.bound_s - 1.0 if self.bound_s else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no placement is shorter, up to rounding (2e-5 of the step)."""
        return self.gap <= TOLERANCE

    @property
    def speed_up(self) -> float:
        """How many times as fast as one device a step is."""
        return self.graph.time_s / self.timed.span_s if self.timed.span_s else 1.0


def place(
    graph: OpGraph, devices: Devices, budget_s: float = 50.0, method: str = "auto", seed: int = 0
) -> Placement:
    """Place operators on equal devices for the shortest step, forward and backward of one micro-batch.

    Pieces between cut vertices are solved alone, equal ones once, and a limit on bytes is left out
    of it. Where the joined answer keeps the limit nothing was lost; otherwise the whole graph is
    solved at once, with the subgraphs' bound. `method` is cp_sat (OR-tools), milp (HiGHS), heft (no
    solver), or auto, the first that is there; `budget_s` is the time for solvers, and all answers
    hold when it is over.

    Raises:
        ConfigError: an unknown method, one that is not installed, or one that knows no contention.
        DoesNotFitError: no placement was found that keeps the devices' limit.
    """
    begin = time.perf_counter()
    name, solver = _choose_solver(method, devices, seed)
    share = -(-graph.held_bytes // devices.num)
    limit = devices.limit_bytes
    if limit is not None:
        largest = max(graph.ops, key=lambda op: op.held_bytes)
        if largest.held_bytes > limit:
            raise DoesNotFitError(f"operator {largest.name}", largest.held_bytes, limit, HELP)
        if share > limit:
            raise DoesNotFitError(f"an equal share of {devices.num} devices", share, limit, HELP)
    subgraphs = split_at_cut_vertices(graph)
    shapes = []  # subgraphs whose names are numbers, so that equal ones are equal
    for part in (subgraph.graph for subgraph in subgraphs):
        ops = tuple(replace(op, name=str(number)) for number, op in enumerate(part.ops))
        shapes.append(OpGraph(ops, part.edges))
    different = sorted(set(shapes), key=lambda shape: shape.num_ops)
    known: dict[OpGraph, tuple[TimedPlacement, float]] = {}
    for index, shape in enumerate(different):
        left_s = budget_s - (time.perf_counter() - begin)
        best, bound_s = _solve(
            shape, replace(devices, limit_bytes=None), solver, left_s / (len(different) - index)
        )
        assert best is not None, "without a limit there is a placement"
        known[shape] = best, bound_s
    bound_s = sum(known[shape][1] for shape in shapes)
    timed = joined(graph, subgraphs, [known[shape][0] for shape in shapes], devices.num)
    if limit is not None and not devices.fit(graph, timed.places):
        best, whole_s = _solve(graph, devices, solver, budget_s - (time.perf_counter() - begin))
        if best is None:
            where = f"every placement found on {devices.num} devices of equal share {share}"
            raise DoesNotFitError(where, share, limit, HELP)
        timed = best
        bound_s = max(bound_s, whole_s)
    solve_s = time.perf_counter() - begin
    return Placement(
        graph, devices, timed, min(bound_s, timed.span_s), name, len(subgraphs), solve_s
    )


def _choose_solver(method: str, devices: Devices, seed: int) -> tuple[str, Solver | None]:
    if method not in METHODS:
        raise ConfigError("--method", method, f"allowed: {', '.join(METHODS)}")
    if method == "cp_sat" or (method == "auto" and cp_sat.IS_INSTALLED):
        if not cp_sat.IS_INSTALLED:
            raise ConfigError(
                "--method", method, "needs OR-tools", "install the extra: pip install .[solver]"
            )
        return "cp_sat", lambda graph, on, hint, limit_s: cp_sat.solve(
            graph, on, hint, limit_s, seed
        )
    if method == "milp" and devices.has_contention:
        raise ConfigError(
            "--method",
            method,
            "lets messages pass each other",
            "use cp_sat or heft with machine.contention",
        )
    if method == "milp" or (method == "auto" and milp.IS_INSTALLED and not devices.has_contention):
        return "milp", milp.solve
    return "heft", None


def _solve(
    graph: OpGraph, devices: Devices, solver: Solver | None, limit_s: float
) -> tuple[TimedPlacement | None, float]:
    """Return the best placement that keeps the devices' limit, None if none was found, and a bound in seconds."""
    timed = heft(graph, devices)
    bound_s = span_bound_s(graph, devices.num)
    if (
        solver is None
        or limit_s <= 0
        or (timed is not None and timed.span_s <= bound_s * (1 + TOLERANCE))
    ):
        return timed, bound_s
    hint = timed
    if hint is None:  # one without a limit, and a time above any that keeps it
        hint = heft(graph, replace(devices, limit_bytes=None))
        assert hint is not None
        crossing_s = sum(2 * devices.delay_s(op.output_bytes) * devices.num for op in graph.ops)
        hint = replace(hint, span_s=graph.time_s + crossing_s)
    solved, solver_bound_s = solver(graph, devices, hint, limit_s)
    fitting = [one for one in (timed, solved) if one is not None and devices.fit(graph, one.places)]
    return min(fitting, key=lambda one: one.span_s, default=None), max(bound_s, solver_bound_s)

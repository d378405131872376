"""Placement of operators on devices.

Each subgraph is placed separately, or the whole graph at once if a limit on bytes couples them.
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
# times are rounded to 1e-6 of a step, for as many operators as a path has
TOLERANCE = 2e-5
HELP = "use more devices, a smaller micro-batch, or partitions of a pipeline"
# maps a graph, devices, a known placement and seconds to a placement, if any, and a lower bound of
# the time
Solver = Callable[[OpGraph, Devices, TimedPlacement, float], tuple[TimedPlacement | None, float]]


@dataclass(frozen=True, slots=True)
class OperatorPlacement:
    """The answer: a placement in time, a lower bound of its time, and the method that found it."""

    graph: OpGraph
    devices: Devices
    timed: TimedPlacement
    bound_s: float
    method: str
    num_pieces: int
    solve_s: float

    @property
    def gap(self) -> float:
        """How much longer the step may be than the shortest one, as a share of the bound."""
        return self.timed.span_s / self.bound_s - 1.0 if self.bound_s else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no placement is shorter, up to rounding (2e-5 of the step)."""
        return self.gap <= TOLERANCE

    @property
    def speed_up(self) -> float:
        """The speed-up of a step over one device."""
        return self.graph.time_s / self.timed.span_s if self.timed.span_s else 1.0


def place(
    graph: OpGraph, devices: Devices, budget_s: float = 50.0, method: str = "auto", seed: int = 0
) -> OperatorPlacement:
    """Place operators on equal devices for the shortest step of one micro-batch.

    The step is a forward and a backward. Pieces between cut vertices are solved separately, equal
    ones only once, without the limit on bytes. If the joined answer keeps the limit, nothing is
    lost; otherwise the whole graph is solved at once, with the bound of the subgraphs. `method` is
    cp_sat (OR-tools), milp (HiGHS), heft (no solver), or auto, the first one available. `budget_s`
    is the time for solvers; answers are valid when it is over.

    Raises:
        ConfigError: The method is unknown, not installed, or does not support contention.
        DoesNotFitError: No placement that keeps the devices' limit was found.
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
    shapes = []  # subgraphs with numbers as names, so that equal ones are equal
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
    return OperatorPlacement(
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
    """Return the best placement that keeps the devices' limit, and a bound in seconds.

    The placement is None if none was found.
    """
    timed = heft(graph, devices)
    bound_s = span_bound_s(graph, devices.num)
    if (
        solver is None
        or limit_s <= 0
        or (timed is not None and timed.span_s <= bound_s * (1 + TOLERANCE))
    ):
        return timed, bound_s
    hint = timed
    # a hint without a limit; its time exceeds the time of any placement that keeps the limit
    if hint is None:
        hint = heft(graph, replace(devices, limit_bytes=None))
        assert hint is not None
        crossing_s = sum(2 * devices.delay_s(op.output_bytes) * devices.num for op in graph.ops)
        hint = replace(hint, span_s=graph.time_s + crossing_s)
    solved, solver_bound_s = solver(graph, devices, hint, limit_s)
    fitting = [
        placement
        for placement in (timed, solved)
        if placement is not None and devices.fit(graph, placement.places)
    ]
    return min(fitting, key=lambda placement: placement.span_s, default=None), max(
        bound_s, solver_bound_s
    )

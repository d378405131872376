"""Placement of operators on devices: each subgraph alone, or the whole graph if a limit on bytes couples them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gems.errors import ConfigError, DoesNotFitError
from gems.partition.dlplacer import cp_sat, milp
from gems.partition.dlplacer.devices import Devices, TimedPlacement
from gems.partition.dlplacer.heft import heft
from gems.partition.dlplacer.subgraphs import Subgraph, joined, span_bound_s, split_at_cut_vertices
from gems.profile.operator_graph import OpGraph

METHODS = ("auto", "cp_sat", "milp", "heft")
TOLERANCE = 2e-5  # times are rounded to 1e-6 of a step, on as many operators as a way has
HELP = "use more devices, a smaller micro-batch, or partitions of a pipeline"


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


def place(graph: OpGraph, devices: Devices, budget_s: float = 50.0, method: str = "auto", seed: int = 0) -> Placement:
    """Place operators on equal devices for the shortest step, forward and backward of one micro-batch.

    Pieces between cut vertices are solved alone, equal ones once, and a limit on bytes is left out of it. Where the
    joined answer keeps the limit nothing was lost; otherwise the whole graph is solved at once, with the subgraphs'
    bound.

    Args:
        graph: the operators.
        devices: equal ones.
        budget_s: time for solvers, in seconds; all answers hold when it is over.
        method: cp_sat (OR-tools), milp (HiGHS), heft (no solver), or auto, the first that is there.
        seed: of the solver.

    Raises:
        ConfigError: an unknown method, one that is not installed, or one that knows no contention.
        DoesNotFitError: no placement was found that keeps the devices' limit.
    """
    begin = time.perf_counter()
    solver = _solver_of(method, devices, seed)
    check_memory(graph, devices)
    free = replace(devices, limit_bytes=None)
    subgraphs = split_at_cut_vertices(graph)
    known: dict[OpGraph, tuple[TimedPlacement, float]] = {}
    different = {_shape(subgraph) for subgraph in subgraphs}
    for at, shape in enumerate(sorted(different, key=lambda shape: shape.num_ops)):
        left_s = budget_s - (time.perf_counter() - begin)
        known[shape] = _solved(shape, free, solver[1], left_s / (len(different) - at))
    solved = [known[_shape(subgraph)] for subgraph in subgraphs]
    bound_s = sum(bound for _, bound in solved)
    timed = joined(graph, subgraphs, [timed for timed, _ in solved], devices.num)
    if not devices.fit(graph, timed.places):
        left_s = budget_s - (time.perf_counter() - begin)
        timed, whole_s = _under_limit(graph, devices, solver[1], left_s)
        bound_s = max(bound_s, whole_s)
    return Placement(
        graph, devices, timed, min(bound_s, timed.span_s), solver[0], len(subgraphs), time.perf_counter() - begin
    )


def check_memory(graph: OpGraph, devices: Devices) -> None:
    """Refuse what no placement can hold.

    Raises:
        DoesNotFitError: an operator above the limit of a device, or all of them above that of all devices.
    """
    limit = devices.limit_bytes
    if limit is None:
        return
    largest = max(graph.ops, key=lambda op: op.held_bytes)
    if largest.held_bytes > limit:
        raise DoesNotFitError(f"operator {largest.name}", largest.held_bytes, limit, HELP)
    share = -(-graph.held_bytes // devices.num)
    if share > limit:
        raise DoesNotFitError(f"an equal share of {devices.num} devices", share, limit, HELP)


Solver = Callable[[OpGraph, Devices, TimedPlacement, float], cp_sat.Found]


def _solver_of(method: str, devices: Devices, seed: int) -> tuple[str, Solver | None]:
    if method not in METHODS:
        raise ConfigError("--method", method, f"allowed: {', '.join(METHODS)}")
    if method == "cp_sat" or (method == "auto" and cp_sat.IS_INSTALLED):
        if not cp_sat.IS_INSTALLED:
            raise ConfigError("--method", method, "needs OR-tools", "install the extra: pip install .[solver]")
        return "cp_sat", lambda graph, on, hint, limit_s: cp_sat.solve(graph, on, hint, limit_s, seed)
    if method == "milp" and devices.has_contention:
        raise ConfigError(
            "--method", method, "lets messages pass each other", "use cp_sat or heft with machine.contention"
        )
    if method == "milp" or (method == "auto" and milp.IS_INSTALLED and not devices.has_contention):
        return "milp", milp.solve
    return "heft", None


def _shape(subgraph: Subgraph) -> OpGraph:
    """Return a subgraph without its names, so that equal ones are equal."""
    graph = subgraph.graph
    ops = tuple(replace(op, name=str(number)) for number, op in enumerate(graph.ops))
    return OpGraph(ops, graph.edges)


def _solved(graph: OpGraph, devices: Devices, solver: Solver | None, limit_s: float) -> tuple[TimedPlacement, float]:
    """Return the best placement of a subgraph, and a bound."""
    timed = heft(graph, devices)
    assert timed is not None
    bound_s = span_bound_s(graph, devices.num)
    if solver is None or timed.span_s <= bound_s * (1 + TOLERANCE) or limit_s <= 0:
        return timed, bound_s
    found = solver(graph, devices, timed, limit_s)
    if found.timed is not None and found.timed.span_s < timed.span_s:
        timed = found.timed
    return timed, max(bound_s, found.bound_s)


def _under_limit(
    graph: OpGraph, devices: Devices, solver: Solver | None, limit_s: float
) -> tuple[TimedPlacement, float]:
    timed = heft(graph, devices)
    found = None
    if solver is not None and limit_s > 0:
        start = timed or _anywhere(graph, devices)
        found = solver(graph, devices, start, limit_s)
    better = [one for one in (timed, found.timed if found else None) if one is not None]
    better = [one for one in better if devices.fit(graph, one.places)]
    if not better:
        share = -(-graph.held_bytes // devices.num)
        raise DoesNotFitError(
            f"every placement found on {devices.num} devices of equal share {share}",
            share,
            devices.limit_bytes or 0,
            HELP,
        )
    return min(better, key=lambda one: one.span_s), found.bound_s if found else 0.0


def _anywhere(graph: OpGraph, devices: Devices) -> TimedPlacement:
    """Return a placement whose time is an upper bound, if none is known that fits."""
    timed = heft(graph, replace(devices, limit_bytes=None))
    assert timed is not None
    crossing_s = sum(2 * devices.delay_s(op.output_bytes) * devices.num for op in graph.ops)
    return replace(timed, span_s=graph.time_s + crossing_s)

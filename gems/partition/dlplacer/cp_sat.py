"""The exact placement of one graph: intervals on devices and links, by CP-SAT (extra `solver`, OR-tools)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

from gems.partition.dlplacer.devices import Devices, Item, Message, TimedPlacement, simulate, with_messages
from gems.profile.operator_graph import OpGraph

IS_INSTALLED = find_spec("ortools") is not None
GRAINS = (
    10**6
)  # of the best known step: times are whole numbers of them, rounded down, so that a bound is one of the real times


@dataclass(frozen=True, slots=True)
class Found:
    """What a solver has: a placement in time, None if it found none, and a time in seconds that none is below."""

    timed: TimedPlacement | None
    bound_s: float


@dataclass(slots=True)
class _Phase:
    """Variables of forward or of backward."""

    starts: list[Any]
    messages: dict[Message, Any]
    span: Any


def solve(graph: OpGraph, devices: Devices, hint: TimedPlacement, limit_s: float, seed: int = 0) -> Found:
    """Check for the placement of the shortest step, from a known one.

    Each operator lies on one device; its forward and its backward are intervals there, no two at once. What crosses
    takes the link's time; under contention a message is an interval of the ports that it passes. Devices are equal, so
    the first operator lies on the first, and a device is used only when the one before is.
    """
    from ortools.sat.python import cp_model

    if hint.span_s <= 0.0:
        return Found(hint, 0.0)
    model: Any = cp_model.CpModel()
    unit_s = hint.span_s / GRAINS
    on = [[model.new_bool_var("") for _ in range(devices.num)] for _ in graph.ops]
    for row in on:
        model.add_exactly_one(row)
    _break_symmetry(model, graph, on)
    if devices.limit_bytes is not None:
        for place in range(devices.num):
            held = sum(op.held_bytes * row[place] for op, row in zip(graph.ops, on, strict=True))
            model.add(held <= devices.limit_bytes)
    crosses = {}
    for u, v in graph.edges:
        crosses[u, v] = model.new_bool_var("")
        for place in range(devices.num):
            model.add_bool_or([~on[u][place], on[v][place], crosses[u, v]])
    phases = [_phase(model, graph, devices, on, crosses, unit_s, is_forward) for is_forward in (True, False)]
    model.minimize(phases[0].span + phases[1].span)
    _hint(model, graph, devices, on, hint)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = max(0.01, limit_s)
    status = solver.solve(model)
    bound_s = max(0.0, solver.best_objective_bound * unit_s)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Found(None, bound_s)
    places = tuple(next(place for place in range(devices.num) if solver.boolean_value(row[place])) for row in on)
    orders = [
        _sequence(graph, devices, places, phase, solver, is_forward)
        for phase, is_forward in zip(phases, (True, False), strict=True)
    ]
    return Found(simulate(graph, devices, places, *orders), bound_s)


def _break_symmetry(model: Any, graph: OpGraph, on: list[list[Any]]) -> None:
    first, *rest = graph.order
    model.add(on[first][0] == 1)
    before = [first]
    for v in rest:
        for place in range(2, len(on[v])):
            model.add_bool_or([~on[v][place], *(on[u][place - 1] for u in before)])
        before.append(v)


def _phase(
    model: Any,
    graph: OpGraph,
    devices: Devices,
    on: list[list[Any]],
    crosses: dict[tuple[int, int], Any],
    unit_s: float,
    is_forward: bool,
) -> _Phase:
    ticks = [int((op.forward_s if is_forward else op.backward_s) / unit_s) for op in graph.ops]
    starts = [model.new_int_var(0, GRAINS, "") for _ in graph.ops]
    span = model.new_int_var(0, GRAINS, "")
    for place in range(devices.num):
        model.add_no_overlap([
            model.new_optional_interval_var(start, length, start + length, row[place], "")
            for start, length, row in zip(starts, ticks, on, strict=True)
        ])  # fmt: skip
    for start, length in zip(starts, ticks, strict=True):
        model.add(span >= start + length)
    model.add(devices.num * span >= sum(ticks))
    for u, v in graph.edges:
        delay = int(devices.delay_s(graph.ops[u].output_bytes) / unit_s)
        source, reader = (u, v) if is_forward else (v, u)
        model.add(starts[reader] >= starts[source] + ticks[source] + delay * crosses[u, v])
    messages: dict[Message, Any] = {}
    if devices.has_contention:
        if is_forward:
            messages = _outputs(model, graph, devices, on, starts, ticks, unit_s)
        else:
            messages = _gradients(model, graph, devices, on, crosses, starts, ticks, unit_s)
    return _Phase(starts, messages, span)


def _outputs(
    model: Any,
    graph: OpGraph,
    devices: Devices,
    on: list[list[Any]],
    starts: list[Any],
    ticks: list[int],
    unit_s: float,
) -> dict[Message, Any]:
    """Make each output to another device an interval of the two ports that it passes."""
    ports = _Ports(model)
    found = {}
    for u, place in product(range(graph.num_ops), range(devices.num)):
        if not graph.successors[u]:
            continue
        length, delay = _lengths(graph, devices, u, unit_s)
        start = found[u, place] = model.new_int_var(0, GRAINS, "")
        goes = model.new_bool_var("")
        model.add_implication(goes, ~on[u][place])
        model.add_bool_or([~goes, *(on[v][place] for v in graph.successors[u])])
        model.add(start >= starts[u] + ticks[u]).only_enforce_if(goes)
        for v in graph.successors[u]:
            model.add_bool_or([~on[v][place], on[u][place], goes])
            model.add(starts[v] >= start + delay).only_enforce_if(goes, on[v][place])
        ports.add((place, "in"), start, length, goes)
        for home in range(devices.num):
            if home != place:
                ports.add((home, "out"), start, length, goes, on[u][home])
    ports.close()
    return found


def _gradients(
    model: Any,
    graph: OpGraph,
    devices: Devices,
    on: list[list[Any]],
    crosses: dict[tuple[int, int], Any],
    starts: list[Any],
    ticks: list[int],
    unit_s: float,
) -> dict[Message, Any]:
    """Make each gradient that comes from another device such an interval."""
    ports = _Ports(model)
    found = {}
    for (u, v), goes in crosses.items():
        length, delay = _lengths(graph, devices, u, unit_s)
        start = found[v, u] = model.new_int_var(0, GRAINS, "")
        model.add(start >= starts[v] + ticks[v]).only_enforce_if(goes)
        model.add(starts[u] >= start + delay).only_enforce_if(goes)
        for place in range(devices.num):
            ports.add((place, "out"), start, length, goes, on[v][place])
            ports.add((place, "in"), start, length, goes, on[u][place])
    ports.close()
    return found


def _lengths(graph: OpGraph, devices: Devices, u: int, unit_s: float) -> tuple[int, int]:
    size = graph.ops[u].output_bytes
    return int(size * devices.s_per_byte / unit_s), int(devices.delay_s(size) / unit_s)


class _Ports:
    """Where messages leave and enter devices, one at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._passing: dict[tuple[int, str], list[Any]] = {}

    def add(self, port: tuple[int, str], start: Any, length: int, *where: Any) -> None:
        """Let a message pass a port if all of some booleans hold."""
        model, goes = self._model, where[0]
        if len(where) > 1:
            goes = model.new_bool_var("")
            model.add_bool_or([*(~each for each in where), goes])
            for each in where:
                model.add_implication(goes, each)
        passing = model.new_optional_interval_var(start, length, start + length, goes, "")
        self._passing.setdefault(port, []).append(passing)

    def close(self) -> None:
        """Report that no two messages are in a port at once."""
        for passing in self._passing.values():
            self._model.add_no_overlap(passing)


def _hint(model: Any, graph: OpGraph, devices: Devices, on: list[list[Any]], hint: TimedPlacement) -> None:
    """Return the known placement with its devices renamed by first use, as the symmetry breaking wants them."""
    names: dict[int, int] = {}
    for v in graph.order:
        names.setdefault(hint.places[v], len(names))
    for v, row in enumerate(on):
        for place in range(devices.num):
            model.add_hint(row[place], names[hint.places[v]] == place)


def _sequence(
    graph: OpGraph, devices: Devices, places: tuple[int, ...], phase: _Phase, solver: Any, is_forward: bool
) -> list[Item]:
    """Order what a solution does by its starts; what starts together by the graph."""
    rank = {v: at for at, v in enumerate(graph.order if is_forward else reversed(graph.order))}
    begin = [solver.value(start) for start in phase.starts]
    order = sorted(range(graph.num_ops), key=lambda v: (begin[v], rank[v]))
    items = with_messages(graph, places, order, is_forward)
    if not devices.has_contention:
        return items
    place_in = {item: at for at, item in enumerate(items)}
    return sorted(
        items,
        key=lambda item: (begin[item] if isinstance(item, int) else solver.value(phase.messages[item]), place_in[item]),
    )

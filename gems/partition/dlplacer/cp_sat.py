"""The exact placement of one graph by CP-SAT (extra `solver`, OR-tools).

The model consists of intervals on devices and links.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import Any

from gems.partition.dlplacer.devices import (
    Devices,
    Item,
    Message,
    Phase,
    TimedPlacement,
    phases,
    simulate,
)
from gems.profile.operator_graph import OpGraph

IS_INSTALLED = find_spec("ortools") is not None
# grains per known step: times are whole numbers of grains, rounded down, so that a bound also holds
# for the real times
GRAINS = 10**6


def solve(
    graph: OpGraph, devices: Devices, hint: TimedPlacement, limit_s: float, seed: int = 0
) -> tuple[TimedPlacement | None, float]:
    """Search for the placement with the shortest step, starting from a known one.

    Return the placement, if any, and a bound in seconds. Each operator is on one device; its
    forward and its backward are intervals there that do not overlap with others. A tensor that
    crosses devices takes the link's time; under contention, a message is an interval on the ports
    that it passes. Devices are equal, so the first operator is on the first device, and a device is
    used only if the one before it is.
    """
    from ortools.sat.python import cp_model

    if hint.span_s <= 0.0:
        return hint, 0.0
    model = _Model(cp_model.CpModel(), graph, devices, hint.span_s / GRAINS)
    model.break_symmetry(hint)
    parts = [_Timing(model, phase) for phase in phases(graph)]
    model.cp.minimize(parts[0].span + parts[1].span)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = max(0.01, limit_s)
    status = solver.solve(model.cp)
    bound_s = max(0.0, solver.best_objective_bound * model.unit_s)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, bound_s
    places = tuple([solver.boolean_value(here) for here in row].index(True) for row in model.on)
    return (
        simulate(graph, devices, places, [part.sequence(places, solver) for part in parts]),
        bound_s,
    )


class _Model:
    """The device of each operator, and the edges that cross; times are in units of `unit_s`."""

    def __init__(self, cp: Any, graph: OpGraph, devices: Devices, unit_s: float) -> None:
        self.cp = cp
        self.graph = graph
        self.devices = devices
        self.unit_s = unit_s
        self.on = [[cp.new_bool_var("") for _ in range(devices.num)] for _ in graph.ops]
        for row in self.on:
            cp.add_exactly_one(row)
        self.crosses = {edge: cp.new_bool_var("") for edge in graph.edges}
        for (u, v), crosses in self.crosses.items():
            for here, there in zip(self.on[u], self.on[v], strict=True):
                cp.add_bool_or([~here, there, crosses])
        if devices.limit_bytes is not None:
            for column in zip(*self.on, strict=True):
                held_bytes = sum(
                    op.held_bytes * here for op, here in zip(graph.ops, column, strict=True)
                )
                cp.add(held_bytes <= devices.limit_bytes)

    def break_symmetry(self, hint: TimedPlacement) -> None:
        """Use devices in the order of the graph, and start from a known placement.

        Its devices are renamed accordingly.
        """
        order = self.graph.order
        on = self.on
        names = dict[int, int]()
        self.cp.add(on[order[0]][0] == 1)
        for at, v in enumerate(order):
            names.setdefault(hint.places[v], len(names))
            for place in range(2, self.devices.num) if at else ():
                self.cp.add_bool_or([~on[v][place], *(on[u][place - 1] for u in order[:at])])
        for v, row in enumerate(on):
            for place, here in enumerate(row):
                self.cp.add_hint(here, names[hint.places[v]] == place)


class _Timing:
    """The starts of the operators of one phase and, under contention, of its messages."""

    def __init__(self, model: _Model, phase: Phase) -> None:
        cp = model.cp
        devices = model.devices
        self._model = model
        self._phase = phase
        self._ticks = [int(time_s / model.unit_s) for time_s in phase.times_s]
        self._starts = [cp.new_int_var(0, GRAINS, "") for _ in self._ticks]
        self.span = cp.new_int_var(0, GRAINS, "")
        for column in zip(*model.on, strict=True):
            timed = zip(self._starts, self._ticks, column, strict=True)
            cp.add_no_overlap(
                [self._interval(start, length, here) for start, length, here in timed]
            )
        for start, length in zip(self._starts, self._ticks, strict=True):
            cp.add(self.span >= start + length)
        cp.add(devices.num * self.span >= sum(self._ticks))
        for (u, v), crosses in model.crosses.items():
            first, then = (u, v) if phase.is_forward else (v, u)
            cp.add(
                self._starts[then]
                >= self._starts[first] + self._ticks[first] + self._lengths(u)[1] * crosses
            )
        self._messages: dict[Message, Any] = {}
        self._passing: dict[tuple[int, str], list[Any]] = {}
        if devices.has_contention:
            if phase.is_forward:
                self._add_outputs()
            else:
                self._add_gradients()
            for passing in self._passing.values():
                cp.add_no_overlap(passing)

    def sequence(self, places: tuple[int, ...], solver: Any) -> list[Item]:
        """Return the items of a solution in the order of their starts; ties follow the graph."""
        begin = [solver.value(start) for start in self._starts]
        items = self._phase.with_messages(places, sorted(self._phase.order, key=lambda v: begin[v]))
        if not self._messages:
            return items
        return sorted(
            items,
            key=lambda item: (
                begin[item] if isinstance(item, int) else solver.value(self._messages[item])
            ),
        )

    def _interval(self, start: Any, length: int, where: Any) -> Any:
        return self._model.cp.new_optional_interval_var(start, length, start + length, where, "")

    def _lengths(self, maker: int) -> tuple[int, int]:
        """Return how long a message occupies a port, and its delay until arrival."""
        devices = self._model.devices
        size = self._model.graph.ops[maker].output_bytes
        return int(size * devices.s_per_byte / self._model.unit_s), int(
            devices.delay_s(size) / self._model.unit_s
        )

    def _pass_port(
        self, port: tuple[int, str], start: Any, length: int, goes: Any, at: Any = None
    ) -> None:
        """Add the interval of a message on a port, if the message is sent.

        `at` tells whether the operator is on the port's device, if that depends on its placement.
        """
        cp = self._model.cp
        passes = goes
        if at is not None:
            passes = cp.new_bool_var("")
            cp.add_bool_or([~goes, ~at, passes])
            cp.add_implication(passes, goes)
            cp.add_implication(passes, at)
        self._passing.setdefault(port, []).append(self._interval(start, length, passes))

    def _add_outputs(self) -> None:
        """Make each output to another device an interval on the two ports that it passes."""
        cp = self._model.cp
        on = self._model.on
        starts = self._starts
        for u, place in product(range(len(on)), range(self._model.devices.num)):
            readers = self._phase.after[u]
            if not readers:
                continue
            length, delay = self._lengths(u)
            start = self._messages[u, u, place] = cp.new_int_var(0, GRAINS, "")
            goes = cp.new_bool_var("")
            cp.add_implication(goes, ~on[u][place])
            cp.add_bool_or([~goes, *(on[v][place] for v in readers)])
            cp.add(start >= starts[u] + self._ticks[u]).only_enforce_if(goes)
            for v in readers:
                cp.add_bool_or([~on[v][place], on[u][place], goes])
                cp.add(starts[v] >= start + delay).only_enforce_if(goes, on[v][place])
            self._pass_port((place, "in"), start, length, goes)
            for home, here in enumerate(on[u]):
                if home != place:
                    self._pass_port((home, "out"), start, length, goes, here)

    def _add_gradients(self) -> None:
        """Make each gradient from another device an interval on the two ports that it passes."""
        cp = self._model.cp
        on = self._model.on
        starts = self._starts
        for (u, v), goes in self._model.crosses.items():
            length, delay = self._lengths(u)
            start = cp.new_int_var(0, GRAINS, "")
            cp.add(start >= starts[v] + self._ticks[v]).only_enforce_if(goes)
            cp.add(starts[u] >= start + delay).only_enforce_if(goes)
            for place in range(self._model.devices.num):
                self._messages[v, u, place] = start
                self._pass_port((place, "out"), start, length, goes, on[v][place])
                self._pass_port((place, "in"), start, length, goes, on[u][place])

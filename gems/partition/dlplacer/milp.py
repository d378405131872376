"""The placement of a graph as a mixed-integer program for HiGHS, used if OR-tools is missing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from gems.partition.dlplacer.devices import Devices, Phase, TimedPlacement, phases, simulate
from gems.profile.operator_graph import OpGraph
from gems.utils.stdio import stdout_to_stderr

IS_INSTALLED = find_spec("scipy") is not None


def solve(
    graph: OpGraph, devices: Devices, hint: TimedPlacement, limit_s: float
) -> tuple[TimedPlacement | None, float]:
    """Search for a placement with a shorter step than a known one.

    Return the placement, if any, and a bound in seconds. The variables are the device of each
    operator, the starts of its forward and its backward, whether each edge crosses devices, and,
    for each pair that may overlap, which one is first. The last only matters if both are on one
    device (disjunctions with the length of the known step as the constant). Messages do not delay
    each other.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    table = _Table(graph, devices, hint.span_s)
    entries = [
        (value, row, column) for row, (terms, _) in enumerate(table.rows) for column, value in terms
    ]
    values, rows, columns = zip(*entries, strict=True)
    coefficients = csr_matrix((values, (rows, columns)), shape=(len(table.rows), len(table.most)))
    upper = np.array([most for _, most in table.rows])
    objective = np.zeros(len(table.most))
    objective[table.spans] = 1.0
    begin = time.perf_counter()
    with stdout_to_stderr():
        answer = milp(
            objective,
            constraints=LinearConstraint(coefficients, -np.inf, upper),
            integrality=np.array(table.is_whole),
            bounds=Bounds(0.0, np.array(table.most)),
            options={
                "time_limit": max(0.1, limit_s - (time.perf_counter() - begin)),
                "mip_rel_gap": 1e-7,
            },
        )
    dual = getattr(answer, "mip_dual_bound", None)
    bound_s = hint.span_s * max(0.0, float(dual)) if dual is not None and np.isfinite(dual) else 0.0
    if answer.x is None:
        return None, bound_s
    places = tuple(int(place) for place in np.asarray(answer.x)[np.array(table.on)].argmax(axis=1))
    sequences = [
        phase.with_messages(
            places, _topological(phase, [round(float(answer.x[column]), 7) for column in starts])
        )
        for phase, starts in zip(phases(graph), table.starts, strict=True)
    ]
    return simulate(graph, devices, places, sequences), bound_s


def _topological(phase: Phase, starts: Sequence[float]) -> list[int]:
    """Order operators by their starts as far as the graph allows.

    The starts are only as exact as the solver's tolerance.
    """
    remaining = sorted(phase.order, key=lambda v: starts[v])
    order = list[int]()
    while remaining:
        done = set(order)
        order.append(next(v for v in remaining if done.issuperset(phase.before[v])))
        remaining.remove(order[-1])
    return order


class _Table:
    """The rows of the MILP, all of the form sum <= upper, with times in units of the known step."""

    def __init__(self, graph: OpGraph, devices: Devices, span_s: float) -> None:
        self.rows: list[tuple[list[tuple[int, float]], float]] = []
        self.is_whole: list[int] = []
        self.most: list[float] = []
        self._graph = graph
        self._devices = devices
        self._span_s = span_s
        self.on = [[self._variable(1) for _ in range(devices.num)] for _ in graph.ops]
        self._crosses = {edge: self._variable(0) for edge in graph.edges}
        self.spans = [self._variable(0), self._variable(0)]
        self.starts = [[self._variable(0) for _ in graph.ops] for _ in self.spans]
        self._add([(span, 1.0) for span in self.spans], 1.0)
        for row in self.on:
            self._add([(x, 1.0) for x in row], 1.0)
            self._add([(x, -1.0) for x in row], -1.0)
        if devices.limit_bytes is not None:
            limit = max(1, devices.limit_bytes)
            for place in range(devices.num):
                terms = [
                    (row[place], op.held_bytes / limit)
                    for row, op in zip(self.on, graph.ops, strict=True)
                ]
                self._add(terms, devices.limit_bytes / limit)
        for column in self.on[graph.order[0]][1:]:  # devices are equal
            self.most[column] = 0.0
        for (u, v), k in self._crosses.items():
            for here, there in zip(self.on[u], self.on[v], strict=True):
                self._add([(here, 1.0), (there, -1.0), (k, -1.0)], 0.0)
        # the operators that follow each operator
        reach: list[set[int]] = [set() for _ in graph.ops]
        for v in reversed(graph.order):
            reach[v].update(graph.successors[v], *(reach[w] for w in graph.successors[v]))
        for phase, start, span in zip(phases(graph), self.starts, self.spans, strict=True):
            self._add_phase(phase, start, span, reach)

    def _add_phase(self, phase: Phase, start: list[int], span: int, reach: list[set[int]]) -> None:
        time = [time_s / self._span_s for time_s in phase.times_s]
        for v, length in enumerate(time):
            self._add([(start[v], 1.0), (span, -1.0)], -length)
        for column in zip(*self.on, strict=True):
            self._add([*zip(column, time, strict=True), (span, -1.0)], 0.0)
        for (u, v), k in self._crosses.items():
            delay = self._devices.delay_s(self._graph.ops[u].output_bytes) / self._span_s
            first, then = (u, v) if phase.is_forward else (v, u)
            self._add([(start[first], 1.0), (k, delay), (start[then], -1.0)], -time[first])
        for u in range(len(time)):
            for v in range(u):
                if u in reach[v] or v in reach[u] or not (time[u] and time[v]):
                    continue
                u_first = self._variable(1)
                # start[first] + time <= start[then] if both are on one device and the variable
                # selects this order; 1 is the length of the known step, and no start is later
                for first, then, sign, slack in ((u, v, 1.0, 1.0), (v, u, -1.0, 0.0)):
                    big = 1.0 + time[first]
                    for first_on, then_on in zip(self.on[first], self.on[then], strict=True):
                        order = [(start[first], 1.0), (start[then], -1.0)]
                        terms = [*order, (first_on, big), (then_on, big), (u_first, sign * big)]
                        self._add(terms, -time[first] + big * (2.0 + slack))

    def _variable(self, is_whole: int) -> int:
        self.is_whole.append(is_whole)
        self.most.append(1.0)
        return len(self.most) - 1

    def _add(self, terms: list[tuple[int, float]], upper: float) -> None:
        self.rows.append((terms, upper))

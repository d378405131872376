"""The placement of a graph as a mixed-integer program for HiGHS, used if OR-tools is missing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from gems.partition.dlplacer.cp_sat import Found
from gems.partition.dlplacer.devices import Devices, TimedPlacement, simulate, with_messages
from gems.profile.operator_graph import OpGraph
from gems.utils.stdio import stdout_to_stderr

IS_INSTALLED = find_spec("scipy") is not None
MAX_OPS = 40  # more pairs than theirs are no matter of a minute


def solve(graph: OpGraph, devices: Devices, hint: TimedPlacement, limit_s: float) -> Found:
    """Check for a placement of a shorter step than that of a known one.

    Variables: the device of each operator, the start of its forward and its backward, for each edge whether it crosses,
    and for each pair that may overlap which is first, which counts where both lie on one device (disjunctions by the
    length of the known step). Messages pass each other freely.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    table = _Table(graph, devices, hint.span_s)
    coefficients = csr_matrix(
        (table.values, (table.rows, table.columns)), shape=(len(table.upper), table.num_variables)
    )
    objective = np.zeros(table.num_variables)
    objective[table.spans] = 1.0
    begin = time.perf_counter()
    with stdout_to_stderr():
        answer = milp(
            objective,
            constraints=LinearConstraint(coefficients, -np.inf, np.array(table.upper)),
            integrality=np.array(table.is_whole),
            bounds=Bounds(0.0, np.array(table.most)),
            options={"time_limit": max(0.1, limit_s - (time.perf_counter() - begin)), "mip_rel_gap": 1e-7},
        )
    dual = getattr(answer, "mip_dual_bound", None)
    bound_s = hint.span_s * max(0.0, float(dual)) if dual is not None and np.isfinite(dual) else 0.0
    if answer.x is None:
        return Found(None, bound_s)
    on = np.asarray(answer.x)[: graph.num_ops * devices.num].reshape(graph.num_ops, devices.num)
    places = tuple(int(place) for place in on.argmax(axis=1))
    orders = []
    for is_forward, starts in zip((True, False), table.starts, strict=True):
        rank = {v: at for at, v in enumerate(graph.order if is_forward else reversed(graph.order))}
        at = [round(float(answer.x[column]), 7) for column in starts]
        order = _topological(graph, sorted(range(graph.num_ops), key=lambda v: (at[v], rank[v])), is_forward)
        orders.append(with_messages(graph, places, order, is_forward))
    return Found(simulate(graph, devices, places, *orders), bound_s)


def _topological(graph: OpGraph, wished: Sequence[int], is_forward: bool) -> list[int]:
    """Keep to a wished order as far as the graph allows: a solver's starts are only as exact as its tolerance."""
    others = graph.predecessors if is_forward else graph.successors
    left, done, found = list(wished), set[int](), list[int]()
    while left:
        v = next(v for v in left if done.issuperset(others[v]))
        left.remove(v)
        done.add(v)
        found.append(v)
    return found


class _Table:
    """The MILP's rows, all of the form sum <= upper, with times in units of the known step."""

    def __init__(self, graph: OpGraph, devices: Devices, span_s: float) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.upper: list[float] = []
        self.is_whole: list[int] = []
        self.most: list[float] = []
        self._graph, self._devices, self._span_s = graph, devices, span_s
        self.on = [[self._variable(1) for _ in range(devices.num)] for _ in graph.ops]
        crosses = {edge: self._variable(0) for edge in graph.edges}
        self.spans = [self._variable(0), self._variable(0)]
        self.starts = [[self._variable(0) for _ in graph.ops] for _ in self.spans]
        self._add([(span, 1.0) for span in self.spans], 1.0)
        for row in self.on:
            self._add([(x, 1.0) for x in row], 1.0)
            self._add([(x, -1.0) for x in row], -1.0)
        if devices.limit_bytes is not None:
            limit = max(1, devices.limit_bytes)
            for place in range(devices.num):
                held = [(row[place], op.held_bytes / limit) for row, op in zip(self.on, graph.ops, strict=True)]
                self._add(held, devices.limit_bytes / limit)
        self.most[self.on[graph.order[0]][0]] = 1.0
        for place in range(1, devices.num):
            self.most[self.on[graph.order[0]][place]] = 0.0
        for (u, v), k in crosses.items():
            for place in range(devices.num):
                self._add([(self.on[u][place], 1.0), (self.on[v][place], -1.0), (k, -1.0)], 0.0)
        reach = _reach(graph)
        for phase, start in enumerate(self.starts):
            self._add_phase(phase, start, crosses, reach)

    @property
    def num_variables(self) -> int:
        """Number of columns."""
        return len(self.most)

    def _add_phase(
        self, phase: int, start: list[int], crosses: dict[tuple[int, int], int], reach: list[set[int]]
    ) -> None:
        graph, devices, span = self._graph, self._devices, self.spans[phase]
        time = [(op.backward_s if phase else op.forward_s) / self._span_s for op in graph.ops]
        for v in range(graph.num_ops):
            self._add([(start[v], 1.0), (span, -1.0)], -time[v])
        for place in range(devices.num):
            self._add([*((row[place], t) for row, t in zip(self.on, time, strict=True)), (span, -1.0)], 0.0)
        for (u, v), k in crosses.items():
            delay = devices.delay_s(graph.ops[u].output_bytes) / self._span_s
            first, then = (v, u) if phase else (u, v)
            self._add([(start[first], 1.0), (k, delay), (start[then], -1.0)], -time[first])
        for u in range(graph.num_ops):
            for v in range(u):
                if u in reach[v] or v in reach[u] or not (time[u] and time[v]):
                    continue
                u_first = self._variable(1)
                for place in range(devices.num):
                    # 1 is the length of the known step, and no start follows it
                    self._disjoint(start, u, v, time[u], place, [(u_first, 1.0)], 1.0)
                    self._disjoint(start, v, u, time[v], place, [(u_first, -1.0)], 0.0)

    def _disjoint(
        self,
        start: list[int],
        first: int,
        then: int,
        time: float,
        place: int,
        wanted: list[tuple[int, float]],
        at_most: float,
    ) -> None:
        """start[first] + time <= start[then] where both lie on `place` and the pair's variable says so."""
        big = 1.0 + time
        self._add(
            [(start[first], 1.0), (start[then], -1.0), (self.on[first][place], big), (self.on[then][place], big)]
            + [(column, sign * big) for column, sign in wanted],
            -time + big * (2.0 + at_most),
        )

    def _variable(self, is_whole: int) -> int:
        self.is_whole.append(is_whole)
        self.most.append(1.0)
        return len(self.most) - 1

    def _add(self, terms: Sequence[tuple[int, float]], upper: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.upper))
            self.columns.append(column)
            self.values.append(value)
        self.upper.append(upper)


def _reach(graph: OpGraph) -> list[set[int]]:
    """Return what follows each operator."""
    found: list[set[int]] = [set() for _ in graph.ops]
    for v in reversed(graph.order):
        for w in graph.successors[v]:
            found[v] |= {w} | found[w]
    return found

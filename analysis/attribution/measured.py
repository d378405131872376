"""The measured times of the counted steps.

They consist of the times of each action of the graph, and the waits of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.attribution.graph import Graph, Times, ready_times, start_table
from analysis.metrics.events import of_kinds, place_numbers, ranks_written
from analysis.metrics.run_metrics import step_times_s
from gems.errors import ConfigError
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, WAIT_KINDS, Kind
from gems.trace import KINDS, Trace

NS = 1e-9
PLACE = ("rank", "kind", "stage", "segment", "direction", "micro_batch")


@dataclass(frozen=True, slots=True)
class Window:
    """The counted steps of all replicas.

    It has the number, begin and length of each step, as in `run_metrics.step_times_s`.
    """

    steps: np.ndarray
    begin_ns: np.ndarray
    step_s: np.ndarray
    num_ranks: int
    num_replicas: int

    def at(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rank in the pipeline, the replica and the number of the step of some rows."""
        return (
            rows["rank"] % self.num_ranks,
            rows["rank"] // self.num_ranks,
            np.searchsorted(self.steps, rows["step"]),
        )

    def since_begin_s(self, rows: np.ndarray, column: str) -> np.ndarray:
        """Return a time of some rows in seconds from the begin of their step."""
        since: np.ndarray = (
            rows[column] - self.begin_ns[np.searchsorted(self.steps, rows["step"])]
        ) * NS
        return since

    def filled(self, count: int, value: float) -> np.ndarray:
        """Return an array of `value` for `count` nodes or ranks, (count, R, N)."""
        return np.full((count, self.num_replicas, len(self.steps)), value)


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of the counted steps, and each rank's waits for messages, copies and input.

    The waits are (ranks, R, N) in seconds.
    """

    window: Window
    times: Times
    messages_s: np.ndarray
    copies_s: np.ndarray
    input_s: np.ndarray


def measure(trace: Trace, graph: Graph) -> Measured:
    """Read the times of the graph's nodes from the events of a trace.

    Raises:
        ConfigError: There is no counted step, the number of ranks is not a multiple of the
            schedule's, or a counted step lacks a compute action.
    """
    num_ranks = graph.num_ranks
    written = ranks_written(trace)
    if written % num_ranks:
        raise ConfigError(
            "trace", f"{written} ranks", f"is no multiple of the {num_ranks} rows of its schedule"
        )
    steps = np.sort(trace.steps, order="step")
    counted = steps["is_warmup"] == 0
    if not counted.any():
        raise ConfigError(
            "trace", trace.source, "holds no step that every rank finished, warm-up steps aside"
        )
    step_s = step_times_s(steps)
    begin_ns = steps["end_ns"] - np.rint(step_s / NS).astype(np.int64)
    window = Window(
        steps["step"][counted], begin_ns[counted], step_s[counted], num_ranks, written // num_ranks
    )
    events = trace.events[np.isin(trace.events["step"], window.steps)]
    is_input = of_kinds(events, "INPUT")
    starts, ends = _spans(events[~is_input], graph, window)
    # In a trace without the ranks' own steps, they begin with the step; their ends are not known.
    begin = window.filled(num_ranks, 0.0)
    over = window.filled(num_ranks, np.nan)
    rows = trace.rank_steps[np.isin(trace.rank_steps["step"], window.steps)]
    begin[window.at(rows)] = window.since_begin_s(rows, "start_ns")
    over[window.at(rows)] = window.since_begin_s(rows, "end_ns")
    data, inputs, waited = _inputs(events[is_input], graph, window)
    table = start_table(graph, begin, data, inputs)
    ready = np.empty_like(ends)
    # a node without an event (such as a wait for a copy) ends as soon as it is ready
    for batch, is_end in graph.batches:
        ready[batch] = ready_times(graph, table, batch, is_end)
        table[batch] = np.where(np.isnan(ends[batch]), ready[batch], ends[batch])
    lag, work = _taken(
        graph, np.where(np.isnan(starts), ready, starts), table[: graph.num_nodes], ready
    )
    messages, copies = _exposed(graph, table, ready)
    _shorten_unseen(graph, table, lag)
    tail = np.where(np.isnan(over), 0.0, over - table[graph.last])
    return Measured(window, Times(work, lag, begin, data, inputs, tail), messages, copies, waited)


def _spans(events: np.ndarray, graph: Graph, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Return the begin and end of each node, (nodes, R, N) in seconds from the step's begin.

    They are NaN without an event.
    """
    nodes = np.flatnonzero(~graph.is_arrival)
    places = [
        (
            graph.rank[node],
            KINDS.index(action.kind.value),
            action.stage,
            -1 if action.segment is None else action.segment,
            action.direction,
            -1 if action.micro_batch is None else action.micro_batch,
        )
        for node, action in ((node, graph.actions[node]) for node in nodes)
    ]
    table = np.array(places, [(column, np.int64) for column in PLACE])
    own = events.copy()
    own["rank"] %= graph.num_ranks
    of_nodes, of_events = place_numbers(PLACE, table, own)
    node_of = np.full(len(nodes) + len(events), -1)
    node_of[of_nodes] = nodes
    found = node_of[of_events]
    events = events[found >= 0]
    place = found[found >= 0], *window.at(events)[1:]
    starts, ends = (window.filled(graph.num_nodes, np.nan) for _ in range(2))
    starts[place], ends[place] = (
        window.since_begin_s(events, column) for column in ("start_ns", "end_ns")
    )
    compute = graph.of_kinds(*COMPUTE_KINDS)
    missing = np.argwhere(np.isnan(ends[compute]))
    if len(missing):
        node, where, step = (int(index) for index in missing[0])
        rank = where * graph.num_ranks + graph.rank[compute[node]]
        raise ConfigError(
            "trace",
            f"step {window.steps[step]}",
            f"lacks {graph.actions[compute[node]]} on rank {rank}",
        )
    arrivals = {int(graph.rank[node]): int(node) for node in np.flatnonzero(graph.is_arrival)}
    for reduction in graph.of_kinds(Kind.REDUCE_GRAD):
        ends[arrivals[int(graph.rank[reduction])]] = starts[reduction]
    return starts, ends


def _inputs(
    events: np.ndarray, graph: Graph, window: Window
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when the data of whole steps and single forwards are ready, and the waits for them."""
    data = window.filled(graph.num_ranks, -np.inf)
    waited = window.filled(graph.num_ranks, 0.0)
    inputs = window.filled(len(graph.readers), -np.inf)
    ready_s = window.since_begin_s(events, "end_ns")
    np.add.at(waited, window.at(events), ready_s - window.since_begin_s(events, "start_ns"))
    whole = events["micro_batch"] < 0
    data[window.at(events[whole])] = ready_s[whole]
    places = {
        (graph.rank[node], graph.actions[node].direction, graph.actions[node].micro_batch): number
        for number, node in enumerate(graph.readers)
    }
    single = events[~whole]
    for row, rank, replica, step, time_s in zip(
        single, *window.at(single), ready_s[~whole], strict=True
    ):
        place = places.get((rank, int(row["direction"]), int(row["micro_batch"])))
        if place is not None:
            inputs[place, replica, step] = time_s
    return data, inputs, waited


def _taken(
    graph: Graph, starts: np.ndarray, ends: np.ndarray, ready: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return each node's lag before its begin, and its duration, (nodes, R, N) in seconds."""
    lag = starts - ready
    work = ends - starts
    planned = () if graph.copies_block else COPY_KINDS
    in_one = graph.of_kinds(*planned, *WAIT_KINDS, Kind.REDUCE_GRAD)
    lag[in_one], work[in_one] = 0.0, ends[in_one] - ready[in_one]
    receives = np.concatenate([graph.of_kinds(*RECV_KINDS), np.flatnonzero(graph.is_arrival)])
    lag[receives], work[receives] = ends[receives] - ready[receives], 0.0
    return lag, work


def _exposed(graph: Graph, table: np.ndarray, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each rank's waits for messages in flight, and its other waits for copies.

    Both are (ranks, R, N) in seconds. Copies belong to the rank, so waiting for earlier copies on
    the copy engine also counts.
    """
    free = table[graph.before]
    waits_itself = graph.of_kinds(*WAIT_KINDS)
    until = ready.copy()
    until[waits_itself] = table[waits_itself]
    exposed = np.clip(until - free, 0.0, None)
    blocks = np.zeros(graph.num_nodes, dtype=bool)
    blocks[graph.of_kinds(*COMPUTE_KINDS, *WAIT_KINDS)] = True
    found = []
    for kinds, departed in ((RECV_KINDS, ready), (COPY_KINDS, np.full_like(ready, -np.inf))):
        waits = np.zeros((graph.num_ranks, *ready.shape[1:]))
        users, needs = graph.needed(kinds)
        is_blocked = blocks[users]
        users = users[is_blocked]
        needs = needs[is_blocked]
        waited = np.minimum(until[users], table[needs]) - np.maximum(free[users], departed[needs])
        waited = np.minimum(np.clip(waited, 0.0, None), exposed[users])
        exposed[users] -= waited
        np.add.at(waits, graph.rank[users], waited)
        found.append(waits)
    return found[0], found[1]


def _shorten_unseen(graph: Graph, table: np.ndarray, lag: np.ndarray) -> None:
    """Limit the flight times of messages that nobody waited for: a busy rank sees them late.

    They count at most as the median of the messages on the same link that were waited for, or else
    as the shortest one.
    """
    users, receives = graph.needed(RECV_KINDS)
    exposed = table[receives] > table[graph.before[users]]
    links: dict[tuple[Kind, int, int], list[int]] = {}
    for number, receive in enumerate(receives):
        action = graph.actions[receive]
        links.setdefault((action.kind, action.stage, action.direction), []).append(number)
    for numbers in links.values():
        places = receives[numbers]
        is_exposed = exposed[numbers]
        flights = lag[places]
        bound = np.median(flights[is_exposed]) if is_exposed.any() else flights.min()
        lag[places] = np.where(is_exposed, flights, np.minimum(flights, bound))

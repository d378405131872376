"""The graph of a step: the dependencies of each action of one pipeline, in a computable order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from gems.errors import ConfigError
from gems.schedule.action import BLOCKING_KINDS, COPY_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.trace import PREDECESSORS, Trace

_CODE_OF = {kind: code for code, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True)
class Graph:
    """The dependencies of each node of one pipeline's step.

    A node is an action on its rank, except sends, which are only posted. A gradient reduction has
    two nodes, the rank's arrival and its end. Nodes wait for rows of a table of M + I + P + 1 rows:
    the M nodes, the inputs of the I forwards that read one (the first is the last row), the
    beginnings of the P ranks, and a last row that is always ready. Rows that are no nodes are
    counted from the end, as -1.

    Attributes:
        schedule: The lowered schedule.
        copies_block: Whether a rank continues only after a copy has ended, as on a processor.
        kind: (M,) index of each node's kind.
        is_arrival: (M,) whether a node is the arrival at a reduction.
        before: (M,) row of the rank's previous action.
        waits: (M, K) rows that a node waits for, including `before`; for a receive, the previous
            actions of both sides.
        batches: Groups of independent nodes, in an order in which they can be computed; with each,
            whether its nodes are ends of reductions, which wait for their rows in all replicas.
        readers: The I nodes that read an input.
        last: (P,) the row of each rank's last action.
    """

    schedule: Schedule
    copies_block: bool
    actions: tuple[Action, ...]
    kind: np.ndarray
    rank: np.ndarray
    is_arrival: np.ndarray
    before: np.ndarray
    waits: np.ndarray
    batches: tuple[tuple[np.ndarray, bool], ...]
    readers: np.ndarray
    last: np.ndarray

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one pipeline."""
        return len(self.last)

    @property
    def num_nodes(self) -> int:
        """The number of nodes, M."""
        return len(self.actions)

    def of_kinds(self, *kinds: Kind) -> np.ndarray:
        """Return the nodes of some kinds, (count,), without the arrivals at reductions."""
        return np.flatnonzero(self._is_of(kinds) & ~self.is_arrival)

    def needed(self, kinds: frozenset[Kind]) -> tuple[np.ndarray, np.ndarray]:
        """Return the nodes that need a node of some kinds, and for each the needed node."""
        others = np.zeros(self.num_ranks + len(self.readers) + 1, dtype=bool)
        users, column = np.nonzero(np.concatenate([self._is_of(kinds), others])[self.waits])
        return users, self.waits[users, column]

    def _is_of(self, kinds: Iterable[Kind]) -> np.ndarray:
        return np.isin(self.kind, [_CODE_OF[kind] for kind in kinds])


def schedule_from(trace: Trace) -> Schedule:
    """Read the schedule in a trace, which has a text with the actions of each rank of a pipeline.

    Raises:
        ConfigError: There is no schedule, or a word is not an action.
    """
    if not trace.schedule_rows:
        raise ConfigError(
            "trace",
            "without a schedule",
            "holds no schedule of the ranks, from which dependencies follow",
            "give the run folder or trace.h5 of a run that has ended",
        )
    parsed = tuple(tuple(Action.parse(word) for word in row.split()) for row in trace.schedule_rows)
    ranks = {
        (a.direction, a.stage): rank
        for rank, row in enumerate(parsed)
        for a in row
        if a.kind is Kind.F
    }
    num_directions = 1 + max((direction for direction, _ in ranks), default=0)
    num_stages = 1 + max((stage for _, stage in ranks), default=0)
    if len(ranks) != num_directions * num_stages:
        raise ConfigError("trace", "schedule", "has stages without a forward")
    placement = Placement(
        len(parsed),
        tuple(tuple(ranks[d, s] for s in range(num_stages)) for d in range(num_directions)),
        tuple(map(tuple, json.loads(trace.attributes.get(PREDECESSORS, "[]")))),
    )
    micro_batches = {
        action.micro_batch for row in parsed for action in row if action.kind is Kind.F
    }
    return Schedule("trace", len(micro_batches), placement, parsed, passes=("add_transfers",))


class _Node(NamedTuple):
    rank: int
    action: Action
    is_arrival: bool
    before: int
    waits: list[int]


def build_graph(schedule: Schedule, copies_block: bool = False) -> Graph:
    """Return the graph of a lowered schedule.

    Raises:
        ConfigError: An action waits for something that never happens.
    """
    blocking = BLOCKING_KINDS | COPY_KINDS if copies_block else BLOCKING_KINDS
    nodes: list[_Node] = []
    # the row that is ready once an action is done; for a send, once it is posted
    done: dict[Action, int] = {}
    arrivals: dict[int, int] = {}
    readers: list[int] = []
    last = []
    for rank, row in enumerate(schedule.rank_schedules):
        before = rank - schedule.num_ranks - 1
        engines: dict[Kind, int] = {}
        for action in row:
            kind = action.kind
            # the remaining time of a started reduction counts for the one that waits for it
            if kind in SEND_KINDS or kind is Kind.START_REDUCE:
                done[action] = before
                continue
            if kind is Kind.REDUCE_GRAD:
                arrivals[rank] = len(nodes)
                nodes.append(_Node(rank, action, True, before, [before]))
                before = arrivals[rank]
            place = done[action] = len(nodes)
            waits = [before, engines.get(kind, before)]
            if kind in COPY_KINDS:
                engines[kind] = place
            if kind is Kind.F and not action.stage and action.segment == schedule.first_segment(0):
                waits.append(-2 - schedule.num_ranks - len(readers))
                readers.append(place)
            nodes.append(_Node(rank, action, False, before, waits))
            if kind in blocking:
                before = place
        last.append(before)
    for node in nodes:
        try:
            node.waits.extend(done[need] for need in dependencies(node.action, schedule))
            if node.action.kind is Kind.REDUCE_GRAD and not node.is_arrival:
                peers = schedule.placement.peers_of(node.rank)
                node.waits.extend(arrivals[peer] for peer in peers)
        except KeyError:
            raise _never_ready(node) from None
    ranks, actions, are_arrivals, befores, waits_of = zip(*nodes, strict=True)
    return Graph(
        schedule,
        copies_block,
        actions,
        np.array([_CODE_OF[action.kind] for action in actions]),
        np.array(ranks),
        np.array(are_arrivals, dtype=bool),
        np.array(befores),
        np.array(list(zip_longest(*waits_of, fillvalue=-1))).T,
        tuple(_batches(nodes)),
        np.array(readers, dtype=np.int64),
        np.array(last),
    )


def _batches(nodes: Sequence[_Node]) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the groups of independent nodes in order; ends of reductions are groups of their own.

    Raises:
        ConfigError: Nodes wait for each other.
    """
    sorter = TopologicalSorter(
        {place: [row for row in node.waits if row >= 0] for place, node in enumerate(nodes)}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        raise _never_ready(nodes[error.args[1][0]]) from None
    while sorter.is_active():
        ready = sorter.get_ready()
        sorter.done(*ready)
        groups: tuple[list[int], list[int]] = ([], [])
        for place in ready:
            node = nodes[place]
            groups[node.action.kind is Kind.REDUCE_GRAD and not node.is_arrival].append(place)
        batches = zip(groups, (False, True), strict=True)
        yield from ((np.array(group), is_end) for group, is_end in batches if group)


def _never_ready(node: _Node) -> ConfigError:
    about = f"{node.action} of rank {node.rank} waits for something that never happens"
    return ConfigError("trace", "schedule", about)


@dataclass(frozen=True, slots=True)
class Times:
    """The times of which a step consists, in seconds; the last two axes are replicas R and steps N.

    Attributes:
        work_s: (nodes, R, N) the duration of an action once all its dependencies are ready.
        lag_s: (nodes, R, N) the delay before an action begins although nothing is waited for; for a
            receive, the time from the moment at which both sides were ready to its arrival.
        begin_s: (ranks, R, N) when a rank begins, from the step's begin.
        data_s: (ranks, R, N) when the data of the whole step are ready, -inf if they are not waited
            for.
        input_s: (readers, R, N) when the input of a forward is ready, -inf if it is not waited for.
        tail_s: (ranks, R, N) the time from a rank's last action to the end of its step.
    """

    work_s: np.ndarray
    lag_s: np.ndarray
    begin_s: np.ndarray
    data_s: np.ndarray
    input_s: np.ndarray
    tail_s: np.ndarray


def start_table(
    graph: Graph, begin_s: np.ndarray, data_s: np.ndarray, input_s: np.ndarray
) -> np.ndarray:
    """Return the rows of `Graph` before the first action, (rows, R, N) in seconds.

    They contain the times that are known, and NaN for nodes.
    """
    nodes = np.full((graph.num_nodes, *begin_s.shape[1:]), np.nan)
    always = np.full((1, *begin_s.shape[1:]), -np.inf)
    return np.concatenate([nodes, input_s[::-1], np.maximum(begin_s, data_s), always])


def ready_times(graph: Graph, table: np.ndarray, batch: np.ndarray, is_end: bool) -> np.ndarray:
    """Return when all dependencies of a batch of nodes are ready, (len(batch), R, N) in seconds."""
    ready: np.ndarray = table[graph.waits[batch]].max(axis=1)
    return np.broadcast_to(ready.max(axis=1, keepdims=True), ready.shape) if is_end else ready


def replay(graph: Graph, times: Times) -> np.ndarray:
    """Return when each step ends, (N,) in seconds from its begin.

    Every action begins when the rank's previous action and all its dependencies have ended. Copies
    follow each other on their engines; messages do not wait for each other; a reduction waits for
    its group in all replicas.
    """
    table = start_table(graph, times.begin_s, times.data_s, times.input_s)
    takes_s = times.lag_s + times.work_s
    for batch, is_end in graph.batches:
        table[batch] = ready_times(graph, table, batch, is_end) + takes_s[batch]
    step_s: np.ndarray = (table[graph.last] + times.tail_s).max(axis=(0, 1))
    return step_s

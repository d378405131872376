"""The graph of a step: the dependencies of each action of one pipeline, in a computable order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gems.errors import ConfigError
from gems.schedule.action import (
    BLOCKING_KINDS,
    COPY_KINDS,
    RANK_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    Action,
    Kind,
)
from gems.schedule.dependencies import dependencies
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule

_CODE_OF = {kind: code for code, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True)
class Graph:
    """The dependencies of each node of one pipeline's step.

    A node is an action on its rank, except sends, which are only posted. A gradient reduction has
    two nodes, the rank's arrival and its end. Nodes wait for rows of a table of M + P + I + 1 rows:
    the M nodes, the beginnings of the P ranks, the inputs of the I forwards that read one, and a
    last row that is always ready.

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


def schedule_from(rows: Sequence[str]) -> Schedule:
    """Read the schedule in a trace, a text with the actions of each rank of a pipeline.

    Raises:
        ConfigError: There is no schedule, or a word is not an action.
    """
    if not rows:
        raise ConfigError(
            "trace",
            "without a schedule",
            "holds no schedule of the ranks, from which dependencies follow",
            "give the run folder or trace.h5 of a run that has ended",
        )
    parsed = tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)
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
    )
    micro_batches = {
        action.micro_batch for row in parsed for action in row if action.kind is Kind.F
    }
    return Schedule("trace", len(micro_batches), placement, parsed, passes=("add_transfers",))


def build_graph(schedule: Schedule, copies_block: bool = False) -> Graph:
    """Return the graph of a lowered schedule.

    Raises:
        ConfigError: An action waits for something that never happens.
    """
    builder = _Builder(schedule, copies_block)
    while any([builder.advance(rank) for rank in range(schedule.num_ranks)]):
        pass
    for rank, row in enumerate(schedule.rank_schedules):
        if builder.following[rank] < len(row):
            action = row[builder.following[rank]]
            raise ConfigError(
                "trace",
                "schedule",
                f"{action} of rank {rank} waits for something that never happens",
            )
    return builder.graph()


class _Builder:
    """A builder that adds nodes after the nodes that they wait for.

    Until all are added, rows -1 - r are the beginnings of the ranks r. The rows after these, -1 - P
    - i, are the inputs.
    """

    def __init__(self, schedule: Schedule, copies_block: bool) -> None:
        self.schedule = schedule
        self.copies_block = copies_block
        self.blocking = BLOCKING_KINDS | COPY_KINDS if copies_block else BLOCKING_KINDS
        self.nodes: list[tuple[int, Action, bool, int, tuple[int, ...]]] = []
        self.place: dict[Action, int] = {}
        self.before = [-1 - rank for rank in range(schedule.num_ranks)]
        self.following = [0] * schedule.num_ranks
        self.engines: dict[tuple[int, Kind], int] = {}
        self.sends: dict[Action, int] = {}
        self.receives: dict[Action, tuple[Action, int]] = {}
        self.readers: list[int] = []

    def advance(self, rank: int) -> bool:
        """Add the next actions of a rank whose dependencies have all been added.

        Return whether any was added.
        """
        row = self.schedule.rank_schedules[rank]
        first = self.following[rank]
        while self.following[rank] < len(row) and self.try_next(rank, row[self.following[rank]]):
            pass
        return self.following[rank] > first

    def try_next(self, rank: int, action: Action) -> bool:
        kind = action.kind
        if kind is Kind.REDUCE_GRAD:
            return self.reduce(rank)
        if kind in RECV_KINDS:
            (send,) = dependencies(action, self.schedule)
            self.receives[send] = action, self.before[rank]
            self.meet(send)
        elif kind in SEND_KINDS:
            self.sends[action] = self.before[rank]
            self.meet(action)
        # the remaining time counts for the reduction that waits for it
        elif kind is not Kind.START_REDUCE:
            needs = () if kind in RANK_KINDS else dependencies(action, self.schedule)
            if any(need not in self.place for need in needs):
                return False
            waits = [self.place[need] for need in needs]
            if (rank, kind) in self.engines:
                waits.append(self.engines[rank, kind])
            self.add(rank, action, waits)
            if kind in COPY_KINDS:
                self.engines[rank, kind] = len(self.nodes) - 1
        self.following[rank] += 1
        return True

    def meet(self, send: Action) -> None:
        """Add the receive of a message once both sides have posted it."""
        if send in self.sends and send in self.receives:
            receive, before = self.receives[send]
            self.place[receive] = len(self.nodes)
            rank = self.schedule.rank_of(receive)
            self.nodes.append((rank, receive, False, before, (before, self.sends[send])))

    def reduce(self, rank: int) -> bool:
        """Add the reductions of a group once all of its ranks have arrived."""
        peers = self.schedule.placement.peers_of(rank)
        rows = self.schedule.rank_schedules
        come = [
            rows[peer][self.following[peer]]
            for peer in peers
            if self.following[peer] < len(rows[peer])
        ]
        if len(come) < len(peers) or any(action.kind is not Kind.REDUCE_GRAD for action in come):
            return False
        arrivals = range(len(self.nodes), len(self.nodes) + len(peers))
        for waits in ([], list(arrivals)):
            for peer, action in zip(peers, come, strict=True):
                self.add(peer, action, waits, is_arrival=not waits)
        for peer in peers:
            self.following[peer] += 1
        return True

    def add(self, rank: int, action: Action, waits: list[int], is_arrival: bool = False) -> None:
        before = self.before[rank]
        place = len(self.nodes)
        if (
            action.kind is Kind.F
            and action.stage == 0
            and action.segment == self.schedule.first_segment(0)
        ):
            waits = [*waits, -1 - self.schedule.num_ranks - len(self.readers)]
            self.readers.append(place)
        self.nodes.append((rank, action, is_arrival, before, (before, *waits)))
        if action.kind in self.blocking:
            self.before[rank] = place
        if action.kind not in RANK_KINDS:
            self.place[action] = place

    def graph(self) -> Graph:
        num_nodes = len(self.nodes)
        ranks, actions, are_arrivals, befores, rows = zip(*self.nodes, strict=True)
        never = num_nodes + self.schedule.num_ranks + len(self.readers)
        waits = np.full((num_nodes, max(map(len, rows), default=1)), never)
        depth = np.zeros(num_nodes, dtype=np.int64)
        for place, row in enumerate(rows):
            waits[place, : len(row)] = _table_rows(row, num_nodes)
            depth[place] = 1 + max((depth[wait] for wait in row if wait >= 0), default=0)
        kind = np.array([_CODE_OF[action.kind] for action in actions])
        is_arrival = np.array(are_arrivals, dtype=bool)
        is_end = (kind == _CODE_OF[Kind.REDUCE_GRAD]) & ~is_arrival
        order = np.lexsort((is_end, depth))
        cuts = np.flatnonzero(np.diff(depth[order]) | np.diff(is_end[order].astype(np.int64))) + 1
        batches = tuple(
            (batch, bool(is_end[batch[0]])) for batch in np.split(order, cuts) if len(batch)
        )
        return Graph(
            self.schedule,
            self.copies_block,
            actions,
            kind,
            np.array(ranks),
            is_arrival,
            _table_rows(befores, num_nodes),
            waits,
            batches,
            np.array(self.readers, dtype=np.int64),
            _table_rows(self.before, num_nodes),
        )


def _table_rows(rows: Sequence[int], num_nodes: int) -> np.ndarray:
    """Return the table rows of nodes, and of ranks and inputs given by negative numbers."""
    found = np.array(rows)
    return np.where(found < 0, num_nodes - 1 - found, found)


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
    return np.concatenate([nodes, np.maximum(begin_s, data_s), input_s, always])


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

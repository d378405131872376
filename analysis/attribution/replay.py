"""The replay of a step from the times of its actions and messages, all replicas and steps at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.attribution.graph import Graph


@dataclass(frozen=True, slots=True)
class Times:
    """The times that make up a step, in seconds; the last two axes are replicas R and steps N.

    Attributes:
        work_s: (nodes, R, N) what an action takes once all that it waits for is ready: compute, a copy, the reduction
            after the last of its group has arrived.
        lag_s: (nodes, R, N) delay before an action begins although nothing is waited for; of a receive, the time from
            the moment at which both sides were ready to its arrival.
        begin_s: (ranks, R, N) when a rank begins, from the step's begin.
        data_s: (ranks, R, N) when the data of the whole step are ready, -inf if they are not waited for.
        input_s: (readers, R, N) when the input of a forward is ready, -inf if it is not waited for.
        tail_s: (ranks, R, N) from a rank's last action to the end of its step.
    """

    work_s: np.ndarray
    lag_s: np.ndarray
    begin_s: np.ndarray
    data_s: np.ndarray
    input_s: np.ndarray
    tail_s: np.ndarray


def start_table(graph: Graph, begin_s: np.ndarray, data_s: np.ndarray, input_s: np.ndarray) -> np.ndarray:
    """Return the rows of `Graph` with the times known before the first action, (rows, R, N) in seconds.

    Nodes are NaN.
    """
    nodes = np.full((graph.num_nodes, *begin_s.shape[1:]), np.nan)
    always = np.full((1, *begin_s.shape[1:]), -np.inf)
    return np.concatenate([nodes, np.maximum(begin_s, data_s), input_s, always])


def ready_times(graph: Graph, table: np.ndarray, batch: np.ndarray, is_end: bool) -> np.ndarray:
    """Return when all that the nodes of a batch wait for is ready, (len(batch), R, N) in seconds."""
    ready: np.ndarray = table[graph.waits[batch]].max(axis=1)
    return np.broadcast_to(ready.max(axis=1, keepdims=True), ready.shape) if is_end else ready


def replay(graph: Graph, times: Times) -> np.ndarray:
    """Return when each step ends, (N,) in seconds from its begin.

    Every action begins when what the rank did before it and all that it needs have ended. Copies follow each other on
    their engines; messages do not wait for each other; a reduction waits for its group in all replicas.
    """
    table = start_table(graph, times.begin_s, times.data_s, times.input_s)
    takes_s = times.lag_s + times.work_s
    for batch, is_end in graph.batches:
        table[batch] = ready_times(graph, table, batch, is_end) + takes_s[batch]
    step_s: np.ndarray = (table[graph.last] + times.tail_s).max(axis=(0, 1))
    return step_s

"""Bounds: times that no placement of a graph is below."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gems.partition.dlplacer.subgraphs import Piece, pieces_of
from gems.profile.operator_graph import OpGraph


def closed_form_s(graph: OpGraph, num_devices: int) -> float:
    """Return total / min(M, total / critical path) in seconds: the speed-up is at most that minimum (Pal et al. 2019)."""
    return max(graph.critical_s, graph.time_s / num_devices)


def span_bound_s(graph: OpGraph, num_devices: int, pieces: Sequence[Piece] | None = None) -> float:
    """Return the sum of the pieces' bounds, forward and backward apart, in seconds; never below the closed form.

    A piece takes at least its longest way, and, of each set of operators with so much before and so much behind them,
    both and their work over the devices between (Carlier and Pinson 1989, section 3, for one machine).
    """
    return math.fsum(
        _phase_bound_s(piece.graph, num_devices, what)
        for piece in (pieces_of(graph) if pieces is None else pieces)
        for what in ("forward_s", "backward_s")
    )


def _phase_bound_s(graph: OpGraph, num_devices: int, what: str) -> float:
    times = [float(getattr(op, what)) for op in graph.ops]
    heads, tails = _longest(graph, times, True), _longest(graph, times, False)
    longest = max(heads[v] + times[v] + tails[v] for v in range(graph.num_ops))
    packed = max(
        min(heads[v] for v in some) + math.fsum(times[v] for v in some) / num_devices + min(tails[v] for v in some)
        for some in _windows(heads, tails)
    )
    return max(longest, packed)


def _windows(heads: Sequence[float], tails: Sequence[float]) -> list[list[int]]:
    limits = {(head, tail) for head in set(heads) for tail in set(tails)}
    found = [[v for v in range(len(heads)) if heads[v] >= head and tails[v] >= tail] for head, tail in limits]
    return [some for some in found if some]


def _longest(graph: OpGraph, times: Sequence[float], is_head: bool) -> list[float]:
    """Return the longest way up to an operator, or behind it, without the operator itself."""
    found = [0.0] * graph.num_ops
    for v in graph.order if is_head else reversed(graph.order):
        others = graph.feeders[v] if is_head else graph.users[v]
        found[v] = max((found[u] + times[u] for u in others), default=0.0)
    return found

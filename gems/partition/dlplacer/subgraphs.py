"""Subgraphs: a graph split at its cut vertices, and the joined answer.

An operator is a cut vertex when each other one is before or after it and no edge leads past it. After it nothing starts
before it has ended, and nothing before it is left to do; so forward of the whole is forward of the subgraphs one after
the other, backward likewise, and only the cut vertex ties them: it, and its backward with it, lies on one device.
Devices are equal, so a subgraph's may be renamed until its cut vertex lies where the subgraph before has put it. Hence
the best placement of the whole is made of best placements of the subgraphs, as long as no limit on bytes couples them.
A chain falls into single operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gems.partition.dlplacer.devices import TimedPlacement
from gems.profile.operator_graph import OpGraph


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Part of a graph, with the number of each of its operators in the whole.

    Where `has_entry`, the first is the cut vertex that the subgraph before ends with; here it takes no time and holds
    nothing.
    """

    graph: OpGraph
    numbers: tuple[int, ...]
    has_entry: bool


def cut_vertices(graph: OpGraph) -> tuple[int, ...]:
    """Return the operators that all paths through the graph pass, first to last."""
    position = {v: at for at, v in enumerate(graph.order)}
    first = {position[u] for u in range(graph.num_ops) if not graph.predecessors[u]}
    ends = [v for v in range(graph.num_ops) if not graph.successors[v]]
    found = []
    open_until = -1  # the furthest reader of what has been made before
    for at, v in enumerate(graph.order):
        # all sources lie before it or are it, all readers of earlier ones end at it, and no earlier one ends nowhere
        is_cut = open_until <= at and max(first) <= at and all(position[end] >= at for end in ends)
        if is_cut:
            found.append(v)
        open_until = max(open_until, *(position[w] for w in graph.successors[v]), -1)
    return tuple(found)


def split_at_cut_vertices(graph: OpGraph) -> tuple[Subgraph, ...]:
    """Split a graph at all its cut vertices, each of which ends a subgraph."""
    cuts = cut_vertices(graph)
    position = {v: at for at, v in enumerate(graph.order)}
    subgraphs = []
    entry: int | None = None
    for end in (*cuts, None):
        begin = -1 if entry is None else position[entry]
        last = graph.num_ops - 1 if end is None else position[end]
        inside = graph.order[begin + 1 : last + 1]
        if inside:
            subgraphs.append(_piece(graph, entry, inside))
        entry = end
    return tuple(subgraphs)


def joined(
    graph: OpGraph, subgraphs: Sequence[Subgraph], solved: Sequence[TimedPlacement], num_devices: int
) -> TimedPlacement:
    """Put the subgraphs' answers together: devices renamed, forward from first to last, backward from last to first."""
    places, forward, backward = [0] * graph.num_ops, [0.0] * graph.num_ops, [0.0] * graph.num_ops
    at = 0.0
    for subgraph, timed in zip(subgraphs, solved, strict=True):
        names = list(range(num_devices))
        if subgraph.has_entry:
            here, there = timed.places[0], places[subgraph.numbers[0]]
            names[here], names[there] = there, here
        for number, place, start in _inner(subgraph, timed.places, timed.forward_start_s):
            places[number], forward[number] = names[int(place)], at + start
        at += timed.forward_span_s
    span = at
    for subgraph, timed in zip(reversed(subgraphs), reversed(solved), strict=True):
        for number, _, start in _inner(subgraph, timed.places, timed.backward_start_s):
            backward[number] = at + start - timed.forward_span_s
        at += timed.span_s - timed.forward_span_s
    return TimedPlacement(tuple(places), tuple(forward), tuple(backward), span, at)


def _inner(subgraph: Subgraph, places: Sequence[int], starts: Sequence[float]) -> list[tuple[int, int, float]]:
    rows = list(zip(subgraph.numbers, places, starts, strict=True))
    return rows[1:] if subgraph.has_entry else rows


def _piece(graph: OpGraph, entry: int | None, inside: Sequence[int]) -> Subgraph:
    numbers = tuple(inside) if entry is None else (entry, *inside)
    local = {number: at for at, number in enumerate(numbers)}
    ops = [graph.ops[number] for number in numbers]
    if entry is not None:
        ops[0] = replace(ops[0], forward_s=0.0, backward_s=0.0, held_bytes=0)
    edges = tuple((local[source], local[target]) for target in inside for source in graph.predecessors[target])
    return Subgraph(OpGraph(tuple(ops), edges), numbers, entry is not None)


def closed_form_s(graph: OpGraph, num_devices: int) -> float:
    """Return total / min(M, total / critical path) in seconds, a bound of the speed-up (Pal et al. 2019)."""
    return max(graph.critical_s, graph.time_s / num_devices)


def span_bound_s(graph: OpGraph, num_devices: int, subgraphs: Sequence[Subgraph] | None = None) -> float:
    """Return the sum of the subgraphs' bounds, forward and backward apart, in seconds; never below the closed form.

    A subgraph takes at least its longest way, and, of each set of operators with so much before and so much after them,
    both and their work over the devices between (Carlier and Pinson 1989, section 3, for one machine).
    """
    return math.fsum(
        _phase_bound_s(subgraph.graph, num_devices, what)
        for subgraph in (split_at_cut_vertices(graph) if subgraphs is None else subgraphs)
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
    """Return the longest way up to an operator, or after it, without the operator itself."""
    found = [0.0] * graph.num_ops
    for v in graph.order if is_head else reversed(graph.order):
        others = graph.predecessors[v] if is_head else graph.successors[v]
        found[v] = max((found[u] + times[u] for u in others), default=0.0)
    return found

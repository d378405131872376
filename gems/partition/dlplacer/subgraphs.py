"""Subgraphs: split a graph at its cut vertices, and join the answers.

An operator is a cut vertex if every other operator is before or after it and no edge bypasses it.
Nothing after it starts before it has ended, and then nothing before it is left. So the forward of
the whole graph is the forward of the subgraphs one after the other, and likewise the backward. The
subgraphs are only connected by the cut vertex, which is on one device together with its backward.
Devices are equal, so the devices of a subgraph can be renamed until its cut vertex is where the
previous subgraph placed it. Hence the best placement of the whole graph consists of best placements
of the subgraphs, unless a limit on bytes couples them. A chain is split into single operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gems.partition.dlplacer.devices import Phase, TimedPlacement, phases
from gems.profile.operator_graph import OpGraph


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Part of a graph, with the number of each of its operators in the whole graph.

    If `has_entry`, the first operator is the cut vertex at the end of the previous subgraph; here
    it takes no time and holds nothing.
    """

    graph: OpGraph
    numbers: tuple[int, ...]
    has_entry: bool

    @property
    def inner(self) -> list[tuple[int, int]]:
        """The pairs of an operator's index and its number in the whole graph, without the entry."""
        return list(enumerate(self.numbers))[self.has_entry :]


def cut_vertices(graph: OpGraph) -> tuple[int, ...]:
    """Return the operators through which all paths of the graph pass, in order."""
    position = {v: at for at, v in enumerate(graph.order)}
    last_source = max(position[v] for v in graph.order if not graph.predecessors[v])
    first_end = min(position[v] for v in graph.order if not graph.successors[v])
    # open_until: the last source, or the last reader of anything computed so far
    cuts, open_until = ([], last_source)
    for at, v in enumerate(graph.order):
        if open_until <= at <= first_end:
            cuts.append(v)
        open_until = max(open_until, *(position[w] for w in graph.successors[v]), -1)
    return tuple(cuts)


def split_at_cut_vertices(graph: OpGraph) -> tuple[Subgraph, ...]:
    """Split a graph at all its cut vertices; each of them ends a subgraph."""
    position = {v: at for at, v in enumerate(graph.order)}
    subgraphs = []
    entry = list[int]()
    begin = 0
    for end in sorted({*(position[cut] + 1 for cut in cut_vertices(graph)), graph.num_ops}):
        numbers = (*entry, *graph.order[begin:end])
        ops = [graph.ops[number] for number in numbers]
        if entry:
            ops[0] = replace(ops[0], forward_s=0.0, backward_s=0.0, held_bytes=0)
        local = {number: at for at, number in enumerate(numbers)}
        inside = numbers[len(entry) :]
        edges = tuple(
            (local[source], local[target])
            for target in inside
            for source in graph.predecessors[target]
        )
        subgraphs.append(Subgraph(OpGraph(tuple(ops), edges), numbers, bool(entry)))
        entry = [numbers[-1]]
        begin = end
    return tuple(subgraphs)


def joined(
    graph: OpGraph,
    subgraphs: Sequence[Subgraph],
    solved: Sequence[TimedPlacement],
    num_devices: int,
) -> TimedPlacement:
    """Join the answers of the subgraphs.

    Devices are renamed; the forward runs from the first to the last subgraph, the backward in
    reverse.
    """
    places = [0] * graph.num_ops
    forward = [0.0] * graph.num_ops
    backward = [0.0] * graph.num_ops
    pairs = list(zip(subgraphs, solved, strict=True))
    at = 0.0
    for subgraph, timed in pairs:
        names = list(range(num_devices))
        if subgraph.has_entry:
            here = timed.places[0]
            there = places[subgraph.numbers[0]]
            names[here], names[there] = there, here
        for index, number in subgraph.inner:
            places[number], forward[number] = (
                names[timed.places[index]],
                at + timed.forward_start_s[index],
            )
        at += timed.forward_span_s
    span = at
    for subgraph, timed in reversed(pairs):
        for index, number in subgraph.inner:
            backward[number] = at + timed.backward_start_s[index] - timed.forward_span_s
        at += timed.span_s - timed.forward_span_s
    return TimedPlacement(tuple(places), tuple(forward), tuple(backward), span, at)


def closed_form_s(graph: OpGraph, num_devices: int) -> float:
    """Return the time for the bound of the speed-up, min(M, total / critical path), in seconds.

    Source: Pal et al. 2019.
    """
    return max(graph.critical_s, graph.time_s / num_devices)


def span_bound_s(graph: OpGraph, num_devices: int) -> float:
    """Return the sum of the subgraphs' bounds, with forward and backward separate, in seconds.

    It is never below the closed form. A subgraph takes at least its longest path. It also takes at
    least, for each set of operators with a minimum time before and after all of them, these times
    and the work of the set divided by the devices (Carlier and Pinson 1989, section 3, for one
    machine).
    """
    return math.fsum(
        _phase_bound_s(phase, num_devices)
        for subgraph in split_at_cut_vertices(graph)
        for phase in phases(subgraph.graph)
    )


def _phase_bound_s(phase: Phase, num_devices: int) -> float:
    times = phase.times_s
    everything = range(len(phase.order))
    heads = _longest(times, phase.order, phase.before)
    tails = _longest(times, phase.order[::-1], phase.after)
    longest = max(heads[v] + times[v] + tails[v] for v in everything)
    windows = (
        [v for v in everything if heads[v] >= head and tails[v] >= tail]
        for head in set(heads)
        for tail in set(tails)
    )
    packed = max(
        min(heads[v] for v in window)
        + math.fsum(times[v] for v in window) / num_devices
        + min(tails[v] for v in window)
        for window in windows
        if window
    )
    return max(longest, packed)


def _longest(
    times: Sequence[float], order: Sequence[int], others: Sequence[Sequence[int]]
) -> list[float]:
    """Return the longest path before each operator, without the operator itself.

    With a reversed order, it is the longest path after the operator.
    """
    longest = [0.0] * len(times)
    for v in order:
        longest[v] = max((longest[u] + times[u] for u in others[v]), default=0.0)
    return longest

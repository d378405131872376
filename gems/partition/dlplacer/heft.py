"""List scheduling: operators by their remaining path, each on the device where it ends first.

HEFT: Topcuoglu et al. 2002, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import attrgetter

from gems.partition.dlplacer.devices import Devices, Phase, TimedPlacement, phases, simulate
from gems.profile.operator_graph import OpGraph

MAX_ROUNDS = 20
MAX_MOVES = 4000
_span = attrgetter("span_s")


def heft(graph: OpGraph, devices: Devices) -> TimedPlacement | None:
    """Place forward by earliest end, then move single operators as long as the step gets shorter.

    The step is never longer than with all operators on one device, if that fits. Return None if not
    even a packing by size keeps the devices' limit.
    """
    starts = [_earliest(graph, devices), (0,) * graph.num_ops, _packed(graph, devices)]
    fitting = [
        timed_by_rank(graph, devices, places) for places in starts if devices.fit(graph, places)
    ]
    if not fitting:
        return None
    best = min(fitting, key=_span)
    tries = 0
    for _ in range(MAX_ROUNDS):
        before = best.span_s
        for v, place in product(range(graph.num_ops), range(devices.num)):
            if place == best.places[v] or tries >= MAX_MOVES:
                continue
            places = (*best.places[:v], place, *best.places[v + 1 :])
            if devices.fit(graph, places):
                tries += 1
                best = min(best, timed_by_rank(graph, devices, places), key=_span)
        if best.span_s >= before:
            break
    return best


def timed_by_rank(graph: OpGraph, devices: Devices, places: Sequence[int]) -> TimedPlacement:
    """Time a placement; of the ready operators, the one with the longest remaining path runs."""
    orders = (
        phase.with_messages(places, _by_rank(graph, devices, places, phase))
        for phase in phases(graph)
    )
    return simulate(graph, devices, places, list(orders))


def _ranks(
    graph: OpGraph, devices: Devices, places: Sequence[int] | None, phase: Phase
) -> list[float]:
    """Return the longest path from each operator to the end.

    It includes transfers that cross devices, or half of each transfer if operators are not placed.
    """
    ranks = [0.0] * graph.num_ops
    for v in reversed(phase.order):
        longest = 0.0
        for w in phase.after[v]:
            share = 0.5 if places is None else float(places[v] != places[w])
            longest = max(
                longest,
                ranks[w] + share * devices.delay_s(graph.ops[phase.maker(v, w)].output_bytes),
            )
        ranks[v] = longest + phase.times_s[v]
    return ranks


def _by_rank(graph: OpGraph, devices: Devices, places: Sequence[int], phase: Phase) -> list[int]:
    ranks = _ranks(graph, devices, places, phase)
    missing = [len(predecessors) for predecessors in phase.before]
    end = [0.0] * graph.num_ops
    free = [0.0] * devices.num
    ready = {v for v, count in enumerate(missing) if not count}
    order: list[int] = []
    while ready:
        begin = {}
        for v in ready:
            arrived = (
                end[u]
                + (places[u] != places[v])
                * devices.delay_s(graph.ops[phase.maker(u, v)].output_bytes)
                for u in phase.before[v]
            )
            begin[v] = max(free[places[v]], *arrived, 0.0)
        v = min(ready, key=lambda v: (begin[v], -ranks[v], v))
        ready.remove(v)
        order.append(v)
        end[v] = free[places[v]] = begin[v] + phase.times_s[v]
        for w in phase.after[v]:
            missing[w] -= 1
            if not missing[w]:
                ready.add(w)
    return order


def _earliest(graph: OpGraph, devices: Devices) -> tuple[int, ...]:
    """Place operators by decreasing rank on the device with room where they end first."""
    ranks = _ranks(graph, devices, None, phases(graph)[0])
    places = [0] * graph.num_ops
    end = [0.0] * graph.num_ops
    free = [0.0] * devices.num
    held_bytes = [0] * devices.num
    for v in sorted(graph.order, key=lambda v: -ranks[v]):
        op = graph.ops[v]
        ends = []
        for place in range(devices.num):
            begin = free[place]
            for u in graph.predecessors[v]:
                delay = 0.0 if places[u] == place else devices.delay_s(graph.ops[u].output_bytes)
                begin = max(begin, end[u] + delay)
            is_full = (
                devices.limit_bytes is not None
                and held_bytes[place] + op.held_bytes > devices.limit_bytes
            )
            ends.append((is_full, begin + op.forward_s, place))
        _, end[v], places[v] = min(ends)
        free[places[v]] = end[v]
        held_bytes[places[v]] += op.held_bytes
    return tuple(places)


def _packed(graph: OpGraph, devices: Devices) -> tuple[int, ...]:
    """Place the largest operators first, each on the device that holds the least."""
    places = [0] * graph.num_ops
    held_bytes = [0] * devices.num
    for v in sorted(range(graph.num_ops), key=lambda v: -graph.ops[v].held_bytes):
        places[v] = held_bytes.index(min(held_bytes))
        held_bytes[places[v]] += graph.ops[v].held_bytes
    return tuple(places)

"""Operator graphs for tests, and the best placement by trying all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from gems.partition.dlplacer.devices import Devices
from gems.profile.operator_graph import Op, OpGraph


def random_graph(seed: int, num_ops: int, share: float = 0.4) -> OpGraph:
    """Return a graph of random times and sizes; an edge leads from lower to higher numbers."""
    rng = random.Random(seed)
    ops = tuple(
        Op(f"op{v}", rng.uniform(0.2, 3), rng.uniform(0.2, 6), rng.randint(0, 3), rng.randint(1, 5))
        for v in range(num_ops)
    )
    edges = tuple((u, v) for v in range(num_ops) for u in range(v) if rng.random() < share)
    return OpGraph(ops, edges)


def branches(*lengths: int, blocks: int = 1, seed: int = 0) -> OpGraph:
    """Return blocks of branches of so many operators, with an operator before and behind each block."""
    rng = random.Random(seed)
    ops = [Op("stem", 1.0, 2.0, 2, 1)]
    edges = []
    for block in range(blocks):
        entry = len(ops) - 1
        ends = []
        for length in lengths:
            before = entry
            for _ in range(length):
                ops.append(Op(f"{block}.{len(ops)}", rng.uniform(0.5, 3), rng.uniform(1, 6), 2, 2))
                edges.append((before, len(ops) - 1))
                before = len(ops) - 1
            ends.append(before)
        ops.append(Op(f"join{block}", 0.1, 0.2, 2, 1))
        edges += [(end, len(ops) - 1) for end in ends]
    return OpGraph(tuple(ops), tuple(edges))


def best_span_s(graph: OpGraph, devices: Devices) -> float:
    """Return the shortest step over all devices of all operators, and all orders.

    Messages pass each other.
    """
    best = float("inf")
    forwards = list(orders(graph.num_ops, graph.predecessors))
    backwards = list(orders(graph.num_ops, graph.successors))
    for rest in product(range(devices.num), repeat=graph.num_ops - 1):
        places = (0, *rest)
        if not devices.fit(graph, places):
            continue
        spans = [
            min(phase_s(graph, devices, places, order, is_forward) for order in some)
            for some, is_forward in ((forwards, True), (backwards, False))
        ]
        best = min(best, sum(spans))
    return best


def orders(num_ops: int, before: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, ...]]:
    """Yield all topological orders."""

    def more(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == num_ops:
            yield done
        for v in range(num_ops):
            if v not in done and set(before[v]) <= set(done):
                yield from more((*done, v))

    return more(())


def phase_s(
    graph: OpGraph,
    devices: Devices,
    places: tuple[int, ...],
    order: tuple[int, ...],
    is_forward: bool,
) -> float:
    """Return the length of one phase, written apart from the code under test."""
    end = [0.0] * graph.num_ops
    free = [0.0] * devices.num
    for v in order:
        begin = free[places[v]]
        for u in graph.predecessors[v] if is_forward else graph.successors[v]:
            size = graph.ops[u if is_forward else v].output_bytes
            begin = max(begin, end[u] + (devices.delay_s(size) if places[u] != places[v] else 0.0))
        op = graph.ops[v]
        end[v] = free[places[v]] = begin + (op.forward_s if is_forward else op.backward_s)
    return max(end)

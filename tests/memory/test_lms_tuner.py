"""The tuner of large model support by distance, against a second reading of its rules that tries every value."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from math import inf

import pytest

from gems.memory.policies.lms.graph import Graph, Parameters, Tensor, Tuned, simulate, tune

GRAPHS = range(20)


def training_graph(seed: int) -> Graph:
    """A net of random width with skips, forward and backward; a few tensors are too small to move."""
    rng = random.Random(seed)
    layers = rng.randint(6, 14)
    tensors = []
    for layer in range(layers):
        back = 2 * layers - 1 - layer
        readers = {layer + 1, back} | (
            {rng.randint(layer + 1, layers - 1)} if layer < layers - 2 else set()
        )
        readers |= {
            2 * layers - 1 - reader for reader in readers if reader < layers and rng.random() < 0.7
        }
        tensors.append(Tensor(rng.randint(1, 100), layer, tuple(readers), rng.random() < 0.9))
        if rng.random() < 0.5 and layer < layers - 2:
            tensors.append(Tensor(rng.randint(1, 40), layer, (rng.randint(layer + 1, layers - 1),)))
    for op in range(layers, 2 * layers - 1):
        tensors.append(Tensor(rng.randint(1, 60), op, (op + 1,)))
    if rng.random() < 0.5:  # a branch beside it that nothing waits for
        side = 2 * layers
        tensors.append(Tensor(rng.randint(1, 50), rng.randint(0, layers - 1), (side, side + 1)))
        return Graph(side + 2, tuple(tensors))
    return Graph(2 * layers, tuple(tensors))


class Reading:
    """The rules once more, as counts of who has still to read what, event by event.

    Slow and without tables.
    """

    def __init__(self, graph: Graph, limit: float) -> None:
        self.graph = graph
        self.limit = limit
        self.level = cache(self._level)
        self.num_levels = 1 + max(self.level(op) for op in range(graph.num_ops))
        self.order = sorted(range(graph.num_ops), key=lambda op: (self.level(op), op))
        self.fits = cache(self._fits)

    def _level(self, op: int) -> int:
        return max(
            (self.level(t.maker) + 1 for t in self.graph.tensors if op in t.consumers), default=0
        )

    def leads(self, op: int, other: int) -> bool:
        after = {c for t in self.graph.tensors if t.maker == op for c in t.consumers}
        return other in after or any(self.leads(next_op, other) for next_op in after)

    def control(self, maker: int, reader: int, ahead: int) -> int | None:
        for back in range(1, 11):
            level = self.level(reader) - ahead - back
            if level <= self.level(maker):
                return None
            for op in range(self.graph.num_ops):
                if self.level(op) == level and self.leads(op, reader):
                    return op
        return None

    def groups(self, far: list[int], groupby: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for reader in far:
            near = groups and self.level(reader) - self.level(groups[-1][-1]) <= groupby
            if groupby > 0 and near:
                groups[-1].append(reader)
            else:
                groups.append([reader])
        return groups

    def _fits(self, threshold: int, ahead: int, groupby: int, mode: int) -> bool:
        held: dict[object, int] = {}
        left: dict[object, int] = {}
        posted: dict[int, list[tuple[object, int, int]]] = {}
        lingering: dict[object, int] = {}
        group_of: dict[tuple[int, int], object] = {}
        waits_out = mode in (1, 3)
        waits_in = mode in (2, 3)

        def take(name: object, size: int, readers: int) -> bool:
            if size >= self.limit - sum(held.values()):
                return False
            held[name], left[name] = size, readers
            return True

        for op in self.order:
            lingering = {name: ops - 1 for name, ops in lingering.items()}
            reads = []
            for number, tensor in enumerate(self.graph.tensors):
                if op not in tensor.consumers:
                    continue
                name = group_of.get((number, op), number)
                if name not in held:
                    members = sum(1 for other in group_of.values() if other == name)
                    if not take(name, tensor.num_bytes, members):
                        return False
                reads.append(name)
            for number, tensor in enumerate(self.graph.tensors):
                if tensor.maker != op or not tensor.consumers:
                    continue
                readers = set(tensor.consumers)
                far = sorted(
                    (r for r in readers if self.level(r) - self.level(op) > threshold),
                    key=lambda r: (self.level(r), r),
                )
                if not tensor.is_movable:
                    far = []
                if not take(number, tensor.num_bytes, len(readers) - len(far)):
                    return False
                for group in self.groups(far, groupby):
                    name = (number, tuple(group))
                    for reader in group:
                        group_of[number, reader] = name
                    trigger = None if waits_in else self.control(op, group[0], ahead)
                    if trigger is not None:
                        posted.setdefault(trigger, []).append((name, tensor.num_bytes, len(group)))
                if far and not waits_out:
                    lingering[number] = 2**30  # until the last near reader has run
            for name in reads:
                left[name] -= 1
            for name in [name for name in held if left[name] == 0]:
                if name in lingering and lingering[name] > 1:
                    lingering[name] = 1  # one operation more
                elif name not in lingering or lingering[name] <= 0:
                    del held[name]
            if not all(take(*copy) for copy in posted.get(op, ())):
                return False
        return True

    def largest(self, fits: Callable[[int], bool], low: int, high: int, start: int) -> int:
        """All values are tried; where the ones that fit are no run from the lowest, a binary search's answer counts."""
        passing = [value for value in range(low, high + 1) if fits(value)]
        if passing == list(range(low, low + len(passing))):
            return passing[-1] if passing else start
        while low <= high:
            middle = (low + high) // 2
            if fits(middle):
                start = middle
                low = middle + 1
            else:
                high = middle - 1
        return start

    def tune(self) -> tuple[int, int, int, int] | None:
        top = self.num_levels
        if self.fits(top, 1, 0, 0):
            return top, 1, 0, 0
        modes = [mode for mode in (0, 1, 2, 3) if self.fits(1, 1, 0, mode)]
        if not modes:
            return None
        mode = modes[0]
        threshold = self.largest(lambda value: self.fits(value, 1, 0, mode), 1, top, 1)
        if mode in (2, 3):
            return threshold, 1, 0, mode
        ahead = self.largest(lambda value: self.fits(threshold, value, 0, mode), 1, top, 1)
        low = 0
        high = top
        groupby = 0
        if self.fits(threshold, ahead, top, mode):
            return threshold, ahead, top, mode
        while low <= high:
            middle = (low + high) // 2
            if self.fits(threshold, ahead, middle, mode):
                groupby = middle
                break
            high = middle - 1
        return threshold, ahead, groupby, mode


def limits_of(graph: Graph) -> list[int]:
    """Limits from too small to large enough, with those between that bring in each mode."""
    most = simulate(graph, Parameters(graph.num_levels), inf).peak_bytes
    least = min(
        simulate(graph, Parameters(1, sync_mode=mode), inf).peak_bytes for mode in (0, 1, 2, 3)
    )
    return sorted(
        {least, least + 1, *(least + (most - least) * part // 8 for part in range(1, 8)), most + 1}
    )


def parameters_of(tuned: Tuned | None) -> tuple[int, int, int, int] | None:
    if tuned is None:
        return None
    found = tuned.parameters
    return found.swapout_threshold, found.swapin_ahead, found.swapin_groupby, found.sync_mode


@pytest.mark.parametrize("seed", GRAPHS)
def test_the_tuner_gives_what_its_rules_give(seed: int) -> None:
    graph = training_graph(seed)
    for limit in limits_of(graph):
        assert parameters_of(tune(graph, limit)) == Reading(graph, limit).tune(), limit


def test_the_graphs_bring_all_that_can_come_out() -> None:
    """Else the comparison would hold less than it says."""
    found = {
        parameters_of(tune(graph, limit))
        for graph in map(training_graph, GRAPHS)
        for limit in limits_of(graph)
    }
    tuned = [each for each in found if each is not None]
    assert None in found
    assert {mode for *_, mode in tuned} == {0, 1, 2, 3}
    assert len({threshold for threshold, *_ in tuned}) > 8
    assert len({ahead for _, ahead, _, _ in tuned}) > 5
    assert len({groupby for _, _, groupby, _ in tuned}) > 5


def chain(sizes: tuple[int, ...]) -> Graph:
    """Forward and backward of layers that each save their output.

    Read by the next layer, and by both backwards.
    """
    num = len(sizes)
    tensors = []
    for layer, size in enumerate(sizes):
        readers = {2 * num - 1 - layer} | (
            {layer + 1, 2 * num - 2 - layer} if layer + 1 < num else set()
        )
        tensors.append(Tensor(size, layer, tuple(sorted(readers))))
    gradients = (Tensor(0, op, (op + 1,)) for op in range(num, 2 * num - 1))
    return Graph(2 * num, (*tensors, *gradients))


def test_a_chain_by_hand() -> None:
    """Four layers of 10 bytes: all at once are 40.

    Levels are 0 to 7; the outputs are read last at 7, 6, 5 and 4.
    Above 5 levels only the first output has a reader, above 6 it has another at 6 that keeps it.
    """
    graph = chain((10, 10, 10, 10))
    assert graph.levels == (0, 1, 2, 3, 4, 5, 6, 7)
    assert simulate(graph, Parameters(8), inf).peak_bytes == 40
    off = simulate(graph, Parameters(5, sync_mode=3), inf)
    assert (off.peak_bytes, off.host_bytes) == (30, 10)
    tuned = tune(graph, 41)
    assert tuned is not None and not tuned.is_needed and tuned.num_plays == 1
    tuned = tune(graph, 40)
    assert tuned is not None and tuned.is_needed
    assert tuned.parameters.swapout_threshold == 5


def test_a_copy_out_that_nobody_waits_for_is_free_one_operation_later() -> None:
    tensors = (Tensor(10, 0, (1, 4)), Tensor(10, 1, (2,)), Tensor(10, 2, (3,)), Tensor(0, 3, (4,)))
    graph = Graph(5, tensors)
    peaks = {mode: simulate(graph, Parameters(2, 1, 0, mode), inf).peak_bytes for mode in (0, 1)}
    assert peaks == {0: 30, 1: 20}


def test_a_copy_back_that_is_waited_for_comes_with_its_reader() -> None:
    """Else it is there one level earlier, beside what is largest."""
    sizes = {1: 3, 2: 3, 3: 12, 4: 3}
    graph = Graph(
        6, (Tensor(10, 0, (1, 5)), *(Tensor(size, op, (op + 1,)) for op, size in sizes.items()))
    )
    peaks = {mode: simulate(graph, Parameters(2, 1, 0, mode), inf).peak_bytes for mode in (0, 2)}
    assert peaks == {0: 25, 2: 16}


def test_given_parameters_stay() -> None:
    graph = training_graph(3)
    limit = limits_of(graph)[4]
    tuned = tune(graph, limit, swapout_threshold=2, swapin_ahead=3, swapin_groupby=4, sync_mode=1)
    assert parameters_of(tuned) == (2, 3, 4, 1)
    assert tuned is not None and tuned.num_plays == 0
    partly = tune(graph, limit, swapin_ahead=2)
    assert partly is not None and (
        partly.parameters.swapin_ahead == 2 or partly.parameters.is_swapin_sync
    )


def test_a_threshold_that_does_not_fit_falls_back_to_waiting() -> None:
    """As the original: where the given threshold does not fit, everything is waited for, and nothing is searched."""
    graph = chain((10, 10, 10, 10))
    tuned = tune(graph, 5, swapout_threshold=7)
    assert tuned is not None
    assert tuned.parameters == Parameters(7, 1, 0, 3)

"""LMS's graph of operations and tensors, and the tuner of its four parameters.

TFLMSv2 (Le et al. 2019, "Automatic GPU memory management for large neural models in TensorFlow")
measures distance in levels of the graph: an operation's level is the length of the longest path to
it from any source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

LOOK_BACK_LEVELS = 10
SYNC_MODES = (0, 1, 2, 3)


class Tensor(NamedTuple):
    """A tensor: its size, and the numbers of its maker and of the operations that read it.

    Only movable tensors may be swapped; the original skips vectors, scalars and variables.
    """

    num_bytes: int
    maker: int
    consumers: tuple[int, ...]
    is_movable: bool = True


class Return(NamedTuple):
    """A copy of a swapped tensor back to the device, for the operations `consumers`.

    It starts after the operation `trigger`; if None, the first consumer starts it and waits.
    """

    tensor: int
    consumers: tuple[int, ...]
    trigger: int | None


class Swap(NamedTuple):
    """A tensor that leaves the device after its last near reader, `last_near`, and its returns."""

    tensor: int
    last_near: int
    returns: tuple[Return, ...]


class Parameters(NamedTuple):
    """The parameters of large model support.

    A tensor is swapped for readers more than `swapout_threshold` levels from its maker, and returns
    `swapin_ahead` levels before them, once for readers within `swapin_groupby` levels of each
    other. `sync_mode` 1 makes copies out synchronous, 2 copies back, 3 both, 0 none.
    """

    swapout_threshold: int
    swapin_ahead: int = 1
    swapin_groupby: int = 0
    sync_mode: int = 0

    @property
    def is_swapout_sync(self) -> bool:
        """Whether kernels wait for copies out."""
        return self.sync_mode in (1, 3)

    @property
    def is_swapin_sync(self) -> bool:
        """Whether kernels wait for copies back; then nothing comes back ahead."""
        return self.sync_mode in (2, 3)


@dataclass(frozen=True)
class Graph:
    """A DAG of `num_ops` operations, numbered in topological order; they run level by level."""

    num_ops: int
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            if not all(tensor.maker < consumer < self.num_ops for consumer in tensor.consumers):
                raise ValueError(
                    f"{tensor} is read before it is made, or by an operation that is not there"
                )

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The level of each operation, 0 for sources."""
        levels = [0] * self.num_ops
        for reader, maker in sorted(
            (reader, tensor.maker) for tensor in self.tensors for reader in tensor.consumers
        ):
            levels[reader] = max(levels[reader], levels[maker] + 1)
        return tuple(levels)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All operations in the order in which they run."""
        return self._by_level(range(self.num_ops))

    @cached_property
    def by_level(self) -> tuple[tuple[int, ...], ...]:
        """The operations of each level, in the order in which they run."""
        return tuple(tuple(ops) for _, ops in groupby(self.order, self.levels.__getitem__))

    @property
    def num_levels(self) -> int:
        """Number of levels, above all distances."""
        return len(self.by_level)

    @cached_property
    def _reached(self) -> tuple[int, ...]:
        """For each operation, the set of operations reachable from it, as bits."""
        reached = [0] * self.num_ops
        for tensor in sorted(self.tensors, key=lambda tensor: -tensor.maker):
            for consumer in tensor.consumers:
                reached[tensor.maker] |= reached[consumer] | 1 << consumer
        return tuple(reached)

    def leads_to(self, op: int, other: int) -> bool:
        """Return whether there is a path from an operation to another."""
        return bool(self._reached[op] >> other & 1)

    def far_consumers(self, tensor: Tensor, threshold: int) -> tuple[int, ...]:
        """Return the readers more than `threshold` levels from a tensor's maker, nearest first."""
        nearest = self.levels[tensor.maker] + threshold
        return self._by_level({op for op in tensor.consumers if self.levels[op] > nearest})

    def groups(self, ops: Sequence[int], groupby: int) -> tuple[tuple[int, ...], ...]:
        """Group operations that are within `groupby` levels of the one before; 0 groups none."""
        groups: list[list[int]] = []
        for op in ops:
            if groupby > 0 and groups and self.levels[op] - self.levels[groups[-1][-1]] <= groupby:
                groups[-1].append(op)
            else:
                groups.append([op])
        return tuple(map(tuple, groups))

    def control(self, maker: int, consumer: int, ahead: int) -> int | None:
        """Return the operation after which a tensor returns for `consumer`, or None.

        It is the latest operation with a path to the consumer, more than `ahead` levels before it,
        and after the maker. At most 10 levels are searched; the first operation of a level wins.
        """
        above = self.levels[consumer] - ahead
        lowest = max(above - LOOK_BACK_LEVELS, self.levels[maker] + 1)
        earlier = (op for level in range(above - 1, lowest - 1, -1) for op in self.by_level[level])
        return next((op for op in earlier if self.leads_to(op, consumer)), None)

    def swaps(self, parameters: Parameters) -> tuple[Swap, ...]:
        """Return the swaps under these parameters."""
        swaps, (threshold, ahead, groupby, _) = [], parameters
        for index, tensor in enumerate(self.tensors):
            far = self.far_consumers(tensor, threshold) if tensor.is_movable else ()
            if not far:
                continue
            near = self._by_level(set(tensor.consumers) - set(far))
            returns = tuple(
                Return(
                    index,
                    group,
                    (
                        None
                        if parameters.is_swapin_sync
                        else self.control(tensor.maker, group[0], ahead)
                    ),
                )
                for group in self.groups(far, groupby)
            )
            swaps.append(Swap(index, near[-1] if near else tensor.maker, returns))
        return tuple(swaps)

    def _by_level(self, ops: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted(ops, key=lambda op: (self.levels[op], op)))


class GraphMemory(NamedTuple):
    """The bytes of a graph under some parameters, and whether it stays below the limit."""

    fits: bool
    peak_bytes: int
    host_bytes: int


class Tuned(NamedTuple):
    """The parameters found, whether the graph needs them to fit, and the number of simulations."""

    parameters: Parameters
    is_needed: bool
    num_plays: int


def simulate(graph: Graph, parameters: Parameters, limit_bytes: float) -> GraphMemory:
    """Simulate the memory of a graph, operation by operation in the order of its levels.

    An operation allocates its on-demand returns and its outputs. After it, tensors without further
    readers are freed, and then the returns that it triggers are allocated. A swapped tensor is
    freed after its last near reader if copies out are synchronous, and one operation later if not.
    As in the original, an allocation must be smaller than the free memory, outputs without readers
    are not allocated, and host memory is unlimited.
    """
    num = graph.num_ops
    place = {op: index for index, op in enumerate(graph.order)}
    takes: list[list[int]] = [[] for _ in range(num)]
    sets_off: list[list[int]] = [[] for _ in range(num)]
    frees = [0] * num
    host = [0] * (num + 1)
    swaps = {swap.tensor: swap for swap in graph.swaps(parameters)}
    for index, (num_bytes, maker, consumers, _) in enumerate(graph.tensors):
        if not consumers:
            continue
        takes[place[maker]].append(num_bytes)
        swap = swaps.get(index)
        if swap is None:
            frees[max(place[op] for op in consumers)] += num_bytes
            continue
        gone = place[swap.last_near] + (not parameters.is_swapout_sync)
        frees[min(gone, num - 1)] += num_bytes
        host[place[maker]] += num_bytes
        last = 0
        for _, readers, trigger in swap.returns:
            if trigger is None:
                takes[place[readers[0]]].insert(0, num_bytes)
            else:
                sets_off[place[trigger]].append(num_bytes)
            frees[max(place[op] for op in readers)] += num_bytes
            last = max(last, place[readers[0] if trigger is None else trigger])
        host[last + 1] -= num_bytes
    used = peak = host_peak = on_host = 0
    fits = True
    for index in range(num):
        for sizes, freed in ((takes[index], frees[index]), (sets_off[index], 0)):
            for num_bytes in sizes:
                fits = fits and used + num_bytes < limit_bytes
                used += num_bytes
            peak = max(peak, used)
            used -= freed
        on_host += host[index]
        host_peak = max(host_peak, on_host)
    return GraphMemory(fits, peak, host_peak)


def tune(
    graph: Graph,
    limit_bytes: float,
    swapout_threshold: int | None = None,
    swapin_ahead: int | None = None,
    swapin_groupby: int | None = None,
    sync_mode: int | None = None,
) -> Tuned | None:
    """Return the parameters by the original's search, or None if nothing fits; given ones stay.

    If the graph fits without swaps (and none of the first three is given), nothing is swapped.
    Otherwise the synchronization mode is the first one, from `sync_mode` (or 0) on, under which
    threshold 1 fits with 1 ahead and no grouping. Binary searches over the levels then find the
    largest threshold that fits and, unless copies back are synchronous, the largest distance ahead.
    All readers are in one group if that fits, else in the first grouping that a binary search
    meets. If fitting is not monotone in a parameter, the result is still one that fits.
    """
    num_levels = graph.num_levels
    num_plays = 0

    def fits(parameters: Parameters) -> bool:
        nonlocal num_plays
        num_plays += 1
        return simulate(graph, parameters, limit_bytes).fits

    def tuned(parameters: Parameters, is_needed: bool = True) -> Tuned:
        return Tuned(parameters, is_needed, num_plays)

    fixed = swapout_threshold, swapin_ahead, swapin_groupby
    threshold, ahead, grouped = (
        value if parameter is None else parameter
        for parameter, value in zip(fixed, (1, 1, 0), strict=True)
    )
    start = Parameters(threshold, ahead, grouped, sync_mode or 0)
    if fixed == (None, None, None):
        off = start._replace(swapout_threshold=num_levels)
        if fits(off):
            return tuned(off, is_needed=False)
    if swapout_threshold is None:
        while not fits(start):
            if start.sync_mode == SYNC_MODES[-1]:
                return None
            start = start._replace(sync_mode=start.sync_mode + 1)
        start = _search(fits, start, "swapout_threshold", 1, num_levels)
    if start.is_swapin_sync or None not in fixed[1:]:
        return tuned(start)
    if swapout_threshold is not None and not fits(start):
        return tuned(start._replace(sync_mode=SYNC_MODES[-1]))
    if swapin_ahead is None:
        start = _search(fits, start, "swapin_ahead", 1, num_levels)
    if swapin_groupby is None:
        wide = start._replace(swapin_groupby=num_levels)
        start = (
            wide
            if fits(wide)
            else _search(fits, start, "swapin_groupby", 0, num_levels, is_any=True)
        )
    return tuned(start)


def _search(
    fits: Callable[[Parameters], bool],
    start: Parameters,
    name: str,
    low: int,
    high: int,
    is_any: bool = False,
) -> Parameters:
    """Return the parameters with the largest value that fits, by binary search.

    With `is_any`, return the first ones that fit.
    """
    best = start
    while low <= high:
        middle = (low + high) // 2
        tried = start._replace(**{name: middle})
        if fits(tried):
            best = tried
            low = middle + 1
            if is_any:
                break
        else:
            high = middle - 1
    return best

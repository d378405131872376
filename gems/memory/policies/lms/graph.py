"""A graph of operations and tensors as LMS sees it, and the tuner of LMS's four parameters.

TFLMSv2 (Le et al. 2019, "Automatic GPU memory management for large neural models in TensorFlow")
measures distance in levels of the graph: an operation's level is the length of the longest way to
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
    """What an operation makes: its size, its maker and the operations that read it, by number.

    Only one that `is_movable` may be swapped; the original leaves out vectors, scalars and
    variables.
    """

    num_bytes: int
    maker: int
    consumers: tuple[int, ...]
    is_movable: bool = True


class Return(NamedTuple):
    """One copy of a swapped tensor that comes back for the operations `consumers`.

    It sets out when the operation `trigger` has run; without one, when the first of the consumers
    begins, which waits.
    """

    tensor: int
    consumers: tuple[int, ...]
    trigger: int | None


class Swap(NamedTuple):
    """A tensor that leaves the device after `last_near`, its last reader there, and its returns."""

    tensor: int
    last_near: int
    returns: tuple[Return, ...]


class Parameters(NamedTuple):
    """What large model support swaps, and when.

    A tensor is swapped for readers more than `swapout_threshold` levels from its maker, comes back
    `swapin_ahead` levels before them, and once for readers within `swapin_groupby` levels of each
    other. `sync_mode` 1 waits for copies out, 2 for copies back, 3 for both, 0 for none.
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
    """A DAG of `num_ops` operations, makers numbered before readers.

    They run level by level, by number.
    """

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
        found = [0] * self.num_ops
        for reader, maker in sorted(
            (reader, tensor.maker) for tensor in self.tensors for reader in tensor.consumers
        ):
            found[reader] = max(found[reader], found[maker] + 1)
        return tuple(found)

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
        """Number of levels: no distance is larger."""
        return len(self.by_level)

    @cached_property
    def _reached(self) -> tuple[int, ...]:
        """For each operation, the set of those that it leads to, as the bits of a number."""
        found = [0] * self.num_ops
        for tensor in sorted(self.tensors, key=lambda each: -each.maker):
            for consumer in tensor.consumers:
                found[tensor.maker] |= found[consumer] | 1 << consumer
        return tuple(found)

    def leads_to(self, op: int, other: int) -> bool:
        """Whether there is a way from an operation to another."""
        return bool(self._reached[op] >> other & 1)

    def far_consumers(self, tensor: Tensor, threshold: int) -> tuple[int, ...]:
        """Return the readers of a tensor that are far from its maker, nearest first.

        They are more than `threshold` levels away.
        """
        nearest = self.levels[tensor.maker] + threshold
        return self._by_level({op for op in tensor.consumers if self.levels[op] > nearest})

    def groups(self, ops: Sequence[int], groupby: int) -> tuple[tuple[int, ...], ...]:
        """Join operations, nearest first, within `groupby` levels of the one before; with 0 none."""
        found: list[list[int]] = []
        for op in ops:
            if groupby > 0 and found and self.levels[op] - self.levels[found[-1][-1]] <= groupby:
                found[-1].append(op)
            else:
                found.append([op])
        return tuple(map(tuple, found))

    def control(self, maker: int, consumer: int, ahead: int) -> int | None:
        """Return the operation after which a tensor is to come back for `consumer`, or None.

        It is the latest that leads to the consumer, lies more than `ahead` levels before it and
        after the maker; at most 10 levels are searched, and of one level the first is taken.
        """
        above = self.levels[consumer] - ahead
        lowest = max(above - LOOK_BACK_LEVELS, self.levels[maker] + 1)
        earlier = (op for level in range(above - 1, lowest - 1, -1) for op in self.by_level[level])
        return next((op for op in earlier if self.leads_to(op, consumer)), None)

    def swaps(self, parameters: Parameters) -> tuple[Swap, ...]:
        """Return what is swapped under these parameters, and how it comes back."""
        found, (threshold, ahead, groupby, _) = [], parameters
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
            found.append(Swap(index, near[-1] if near else tensor.maker, returns))
        return tuple(found)

    def _by_level(self, ops: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted(ops, key=lambda op: (self.levels[op], op)))


class GraphMemory(NamedTuple):
    """The bytes of a graph under some parameters; `fits` tells if it stays below the limit."""

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

    An operation allocates what comes back for it on demand, and its outputs; after it what nobody
    reads any more is freed, then the copies that it sets off are allocated. A tensor that leaves is
    free after its last near reader where copies out are waited for, and one operation later where
    they are not. As in the original, an allocation must be smaller than what is free, an output
    that nobody reads is never there, and host memory only counts.
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
    """Return the parameters by the original's search; those that are given stay.

    None if even the least does not fit.
    Nothing is swapped where the graph fits so (and none of the first three is given). Otherwise the
    synchronisation mode is the first, from `sync_mode` (or 0) on, under which threshold 1 fits with
    1 ahead and no grouping. Then, each by a binary search over the levels: the largest threshold
    that fits; unless copies back are waited for, the largest distance ahead; and all readers in one
    group where that fits, else the first grouping that a binary search meets. Where fitting is not
    monotone in a parameter, a binary search's answer is what it is: one that fits.
    """
    num_levels = graph.num_levels
    num_plays = 0

    def fits(parameters: Parameters) -> bool:
        nonlocal num_plays
        num_plays += 1
        return simulate(graph, parameters, limit_bytes).fits

    def found(parameters: Parameters, is_needed: bool = True) -> Tuned:
        return Tuned(parameters, is_needed, num_plays)

    given = swapout_threshold, swapin_ahead, swapin_groupby
    threshold, ahead, grouped = (
        value if each is None else each for each, value in zip(given, (1, 1, 0), strict=True)
    )
    start = Parameters(threshold, ahead, grouped, sync_mode or 0)
    if given == (None, None, None):
        off = start._replace(swapout_threshold=num_levels)
        if fits(off):
            return found(off, is_needed=False)
    if swapout_threshold is None:
        while not fits(start):
            if start.sync_mode == SYNC_MODES[-1]:
                return None
            start = start._replace(sync_mode=start.sync_mode + 1)
        start = _search(fits, start, "swapout_threshold", 1, num_levels)
    if start.is_swapin_sync or None not in given[1:]:
        return found(start)
    if swapout_threshold is not None and not fits(start):
        return found(start._replace(sync_mode=SYNC_MODES[-1]))
    if swapin_ahead is None:
        start = _search(fits, start, "swapin_ahead", 1, num_levels)
    if swapin_groupby is None:
        wide = start._replace(swapin_groupby=num_levels)
        start = (
            wide
            if fits(wide)
            else _search(fits, start, "swapin_groupby", 0, num_levels, is_any=True)
        )
    return found(start)


def _search(
    fits: Callable[[Parameters], bool],
    start: Parameters,
    name: str,
    low: int,
    high: int,
    is_any: bool = False,
) -> Parameters:
    """Return the last parameters that fitted in a binary search for the largest value.

    With `is_any`, return the first that fitted.
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

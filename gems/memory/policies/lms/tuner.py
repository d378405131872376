"""The tuner of large model support by distance: four parameters under which a graph fits, found by playing its memory.

TFLMSv2 (Le et al. 2019, "Automatic GPU memory management for large neural models in TensorFlow"). It knows no times: it
swaps as little as fits, and then brings back as early as fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gems.memory.policies.lms.graph import Graph, Swap

SYNC_MODES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What large model support swaps, and when.

    A tensor is swapped for readers more than `swapout_threshold` levels from its maker, comes back `swapin_ahead` levels
    before them, and once for readers within `swapin_groupby` levels of each other. `sync_mode` 1 waits for copies out,
    2 for copies back, 3 for both, 0 for none.
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

    def swaps(self, graph: Graph) -> tuple[Swap, ...]:
        """Return what is swapped in a graph."""
        return graph.swaps(self.swapout_threshold, self.swapin_ahead, self.swapin_groupby, self.is_swapin_sync)


@dataclass(frozen=True, slots=True)
class Played:
    """What a graph holds under some parameters, in bytes; `fits` says whether it stays below the limit."""

    fits: bool
    peak_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """The parameters that were found; `is_needed` is False where the graph fits without swapping.

    `num_plays` counts how often the memory was played.
    """

    parameters: Parameters
    is_needed: bool
    num_plays: int


def play(graph: Graph, parameters: Parameters, limit_bytes: float) -> Played:
    """Simulate the memory of a graph, operation by operation in the order of its levels.

    An operation allocates what comes back for it on demand, and its outputs; behind it what nobody reads any more is
    freed, then the copies that it sets off are allocated. A tensor that leaves is free behind its last near reader where
    copies out are waited for, and one operation later where they are not. As in the original, an allocation must be
    smaller than what is free, an output that nobody reads is never there, and host memory only counts.
    """
    order = graph.order
    place = {op: index for index, op in enumerate(order)}
    takes: list[list[int]] = [[] for _ in order]
    sets_off: list[list[int]] = [[] for _ in order]
    frees = [0] * len(order)
    host = [0] * (len(order) + 1)
    swaps = {swap.tensor: swap for swap in parameters.swaps(graph)}
    for index, tensor in enumerate(graph.tensors):
        if not tensor.consumers:
            continue
        takes[place[tensor.maker]].append(tensor.num_bytes)
        swap = swaps.get(index)
        if swap is None:
            frees[max(place[op] for op in tensor.consumers)] += tensor.num_bytes
            continue
        gone = place[swap.last_near] + (not parameters.is_swapout_sync)
        frees[min(gone, len(order) - 1)] += tensor.num_bytes
        host[place[tensor.maker]] += tensor.num_bytes
        last = 0
        for back in swap.returns:
            first = place[back.consumers[0]]
            if back.trigger is None:
                takes[first].insert(0, tensor.num_bytes)
            else:
                sets_off[place[back.trigger]].append(tensor.num_bytes)
            frees[max(place[op] for op in back.consumers)] += tensor.num_bytes
            last = max(last, first if back.trigger is None else place[back.trigger])
        host[last + 1] -= tensor.num_bytes
    used = peak = 0
    fits = True
    for index in range(len(order)):
        for num_bytes in takes[index]:
            fits = fits and used + num_bytes < limit_bytes
            used += num_bytes
        peak = max(peak, used)
        used -= frees[index]
        for num_bytes in sets_off[index]:
            fits = fits and used + num_bytes < limit_bytes
            used += num_bytes
        peak = max(peak, used)
    host_peak = held = 0
    for change in host:
        held += change
        host_peak = max(host_peak, held)
    return Played(fits, peak, host_peak)


def tune(
    graph: Graph,
    limit_bytes: float,
    swapout_threshold: int | None = None,
    swapin_ahead: int | None = None,
    swapin_groupby: int | None = None,
    sync_mode: int | None = None,
) -> Tuned | None:
    """Return the parameters by the original's search; those that are given stay. None where even the least does not fit.

    Nothing is swapped where the graph fits so (and none of the first three is given). Otherwise the synchronisation mode
    is the first, from `sync_mode` (or 0) on, under which threshold 1 fits with 1 ahead and no grouping. Then, each by a
    binary search over the levels: the largest threshold that fits; unless copies back are waited for, the largest
    distance ahead; and all readers in one group where that fits, else the first grouping that a binary search meets.
    Where fitting is not monotone in a parameter, a binary search's answer is what it is: one that fits.
    """
    num_levels, plays = graph.num_levels, 0

    def fits(parameters: Parameters) -> bool:
        nonlocal plays
        plays += 1
        return play(graph, parameters, limit_bytes).fits

    def found(parameters: Parameters, is_needed: bool = True) -> Tuned:
        return Tuned(parameters, is_needed, plays)

    start = Parameters(
        swapout_threshold if swapout_threshold is not None else 1,
        swapin_ahead if swapin_ahead is not None else 1,
        swapin_groupby if swapin_groupby is not None else 0,
        sync_mode or 0,
    )
    if swapout_threshold is swapin_ahead is swapin_groupby is None:
        off = replace(start, swapout_threshold=num_levels)
        if fits(off):
            return found(off, is_needed=False)
    if swapout_threshold is None:
        while not fits(start):
            if start.sync_mode == SYNC_MODES[-1]:
                return None
            start = replace(start, sync_mode=start.sync_mode + 1)
        start = _search(fits, start, "swapout_threshold", 1, num_levels)
    if start.is_swapin_sync:
        return found(start)
    is_known = swapout_threshold is None
    if swapin_ahead is None:
        if not is_known and not fits(start):
            return found(replace(start, sync_mode=SYNC_MODES[-1]))
        start, is_known = _search(fits, start, "swapin_ahead", 1, num_levels), True
    if swapin_groupby is None:
        if not is_known and not fits(start):
            return found(replace(start, sync_mode=SYNC_MODES[-1]))
        wide = replace(start, swapin_groupby=num_levels)
        start = wide if fits(wide) else _search(fits, start, "swapin_groupby", 0, num_levels, is_any=True)
    return found(start)


def _search(
    fits: Callable[[Parameters], bool], start: Parameters, name: str, low: int, high: int, is_any: bool = False
) -> Parameters:
    """Return the last parameters that fitted in a binary search for the largest value, or the first with `is_any`."""
    best = start
    while low <= high:
        middle = (low + high) // 2
        tried = replace(start, **{name: middle})
        if fits(tried):
            best, low = tried, middle + 1
            if is_any:
                break
        else:
            high = middle - 1
    return best

"""vDNN's prefetch window: which offloaded input comes back while which layer's backward runs."""

from __future__ import annotations

from collections.abc import Sequence


def find_prefetch(
    layer: int, is_conv: Sequence[bool], is_offloaded: Sequence[bool], is_prefetched: Sequence[bool]
) -> int | None:
    """Return the layer whose input is to be fetched while the backward of `layer` runs; None for no one's.

    It is the nearest layer before whose input has left and is not on its way back yet. The search ends at the next
    convolution, so that nothing comes back long before it is needed (Rhu et al. 2016, arXiv 1602.08124, figure 10).
    """
    for before in range(layer - 1, -1, -1):
        if is_offloaded[before] and not is_prefetched[before]:
            return before
        if is_conv[before]:
            return None
    return None


def prefetch_window(is_conv: Sequence[bool], is_offloaded: Sequence[bool]) -> tuple[int | None, ...]:
    """Return for each layer, first to last, the one whose input is fetched while the layer's backward runs.

    Every offloaded input is there once, and at the latest with the layer behind: only that of the very last layer has
    nobody to bring it, and comes on demand.

    Args:
        is_conv: for each layer in the order of forward, whether it is a convolution.
        is_offloaded: for each, whether its input leaves the device in forward.
    """
    is_prefetched = [False] * len(is_conv)
    fetched: list[int | None] = [None] * len(is_conv)
    for layer in range(len(is_conv) - 1, -1, -1):
        fetched[layer] = found = find_prefetch(layer, is_conv, is_offloaded, is_prefetched)
        if found is not None:
            is_prefetched[found] = True
    return tuple(fetched)

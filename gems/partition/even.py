"""Partitions by the number of layers."""

from __future__ import annotations

from itertools import accumulate


def even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return boundaries of stages whose numbers of layers differ by at most one.

    The longer stages are in the middle. Stage s consists of layers boundaries[s] up to boundaries[s
    + 1]. The first stage has the largest images and the last one the loss, so they do not get
    additional layers.
    """
    size, extra = divmod(num_layers, num_stages)
    first_long = (num_stages - extra) // 2
    sizes = (size + (first_long <= s < first_long + extra) for s in range(num_stages))
    return tuple(accumulate(sizes, initial=0))

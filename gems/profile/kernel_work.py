"""The work of a convolution's kernel on a GPU: thread blocks, and products that Winograd saves.

A device with few blocks is partly idle, so a kernel takes at least one round of its
multiprocessors, and half a round more on average for the last one. So throughput rises with the
samples of a micro-batch until blocks fill the device; beyond that, time is linear in the samples.

Sources: 128 x 128, 128 x 64 and 128 x 32 outputs a block are in the names of cuDNN's kernels for
Maxwell and Pascal (`maxwell_scudnn_128x64_...`); two such blocks of 256 threads fit the 65536
registers of a multiprocessor with 128 registers a thread. Lavin and Gray 2015 (arXiv 1509.09308):
F(2x2, 3x3) takes 16 products for 4 outputs of 9 products each; its block of 32 tiles x 32 filters
transforms each tile in 32 additions and each filter in 28 (sections 4.1 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_PIXELS = 128
_CHANNELS = (128, 64, 32)
_BLOCKS = 2  # at once on a multiprocessor
_TILE_PX = 4  # outputs of a tile, 2 x 2
_SIDE = 32  # tiles, and filters, of a block
_PRODUCTS = 16
WINOGRAD_GAIN = 9 * _TILE_PX / _PRODUCTS / (1 + (32 + 28) / (_PRODUCTS * _SIDE))


class KernelWork(NamedTuple):
    """The thread blocks of a kernel, and its operations relative to those of its formula.

    `blocks` is 0 for a kernel that always fills the device.
    """

    blocks: float = 0
    share: float = 1.0

    def slowdown(self, multiprocessors: int) -> float:
        """Return how many times longer it computes than at the device's rate."""
        if not self.blocks:
            return self.share
        rounds = self.blocks / (_BLOCKS * multiprocessors)
        return self.share * max(1.0, rounds + 0.5) / rounds


FULL = KernelWork()


def convolution_work(
    images: Sequence[int],
    channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    has_winograd: bool,
) -> KernelWork:
    """Return the work of a convolution to `images`, the shape (N, C, H, W) of the larger operand.

    `channels` are those that it makes: of the output, or of the input for an input gradient.
    """
    pixels = images[0] * math.prod(images[2:])
    if has_winograd and is_winograd(kernel, stride):
        tiles = math.ceil(pixels / _TILE_PX / _SIDE)
        return KernelWork(tiles * math.ceil(channels / _SIDE), 1 / WINOGRAD_GAIN)
    rows = math.ceil(pixels / _PIXELS)
    width = min(_CHANNELS, key=lambda width: math.ceil(channels / width) * width)
    columns = math.ceil(channels / width)
    padded = rows * _PIXELS * columns * width / (pixels * channels)
    return KernelWork(rows * columns, padded)


def weight_gradient_work(
    kernel: Sequence[int], stride: Sequence[int], has_winograd: bool
) -> KernelWork:
    """Return the work of a weight gradient, which is split over samples until it fills a device."""
    is_saved = has_winograd and is_winograd(kernel, stride)
    return KernelWork(0, 1 / WINOGRAD_GAIN) if is_saved else FULL


def is_winograd(kernel: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the algorithm applies: two sides of 3 and no stride."""
    return tuple(kernel) == (3, 3) and set(stride) == {1}

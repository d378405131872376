"""The workspace of a convolution by its fastest algorithm, by arithmetic: matrix product, transform, or tiled transform.

Of cuDNN 4's algorithms three families matter here. The implicit matrix product needs no workspace. The Fourier transform
(`FFT`, `FFT_TILING`) holds the spectra of maps, filters and outputs, and multiplies these instead (Mathieu et al. 2013,
arXiv 1312.5851). Which one is the fastest follows from operations and bytes over the device's rates: cuDNN's own choice
of 2016 cannot be asked any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gems.memory.policies.vdnn.paper.calls import Network, Window
from gems.memory.policies.vdnn.paper.device import Device

TILE_PX = 32
_LARGEST_PX = 256  # of a padded map that cuDNN transforms in one piece
_COMPLEX_BYTES = 8
_FLOPS_A_PRODUCT = 8  # of two complex numbers, and the addition behind it


def workspace_bytes(network: Network, device: Device) -> int:
    """Return the bytes of the one workspace that all convolutions share, each with its fastest algorithm."""
    return max((fastest(call.window, device)[1] for call in network.calls if call.window), default=0)


def fastest(window: Window, device: Device) -> tuple[float, int]:
    """Return seconds and workspace bytes of the fastest algorithm for a convolution's forward."""
    direct = (window.flops / device.flops_per_s, 0)
    return min((direct, *(_transformed(window, *shape, device) for shape in _transforms(window))))


def _transforms(window: Window) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (height, width) of the transforms that a convolution can take, and how many cover a map."""
    if window.stride != 1:
        return
    padded = [side + 2 * edge for side, edge in zip(window.in_px, window.padding, strict=True)]
    if max(padded) <= _LARGEST_PX:
        height_px, width_px = (1 << (side - 1).bit_length() for side in padded)
        yield (height_px, width_px), 1
    if max(window.kernel) <= TILE_PX:
        sides = zip(window.out_px, window.kernel, strict=True)
        yield ((TILE_PX, TILE_PX), math.prod(math.ceil(side / (TILE_PX - kernel + 1)) for side, kernel in sides))


def _transformed(window: Window, px: tuple[int, int], num_tiles: int, device: Device) -> tuple[float, int]:
    """Return seconds and workspace bytes of one convolution by transforms: there, product of spectra, and back."""
    maps = num_tiles * window.images * (window.in_channels + window.channels)
    transforms = maps + window.in_channels * window.channels
    size = math.prod(px)
    spectrum = px[0] * (px[1] // 2 + 1)  # of real numbers half is enough
    products = num_tiles * window.images * window.in_channels * window.channels
    flops = transforms * 2.5 * size * math.log2(size) + _FLOPS_A_PRODUCT * spectrum * products
    spectra_bytes = _COMPLEX_BYTES * spectrum * transforms
    seconds = flops / device.flops_per_s + 2 * spectra_bytes / device.memory_bytes_per_s
    return seconds, spectra_bytes

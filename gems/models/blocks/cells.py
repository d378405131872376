"""The cells of AmoebaNet-D, which read the outputs of the two cells before them.

Source: Real et al. 2018 (arXiv 1802.01548).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.models.blocks.parts import conv2d, norm2d
from gems.models.families.amoebanet import Genotype

_BOTTLENECK = 4


class CellStem(nn.Sequential):
    """A 3x3 convolution of stride 2 and a norm, without an activation, since cells begin with one.

    Input (N, in_channels, H, W), output (N, out_channels, ceil(H / 2), ceil(W / 2)).
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        conv = conv2d(in_channels, out_channels, 3, 2, norm)
        super().__init__(OrderedDict(conv=conv, norm=norm2d(norm, out_channels)))


class Cell(nn.Module):
    """A cell of pairs of operations.

    Both inputs are projected to `channels`. Each pair of the genotype then adds one state, and the
    joined states are concatenated. The inputs are the output of the last cell (N, channels_last, H,
    W) and of the cell before it (N, channels_before, H, W, or twice as many pixels per side after a
    reduction); the first cell has only one input. The output is (N, channels * len(joined), H', W')
    and, unless `is_last`, the last cell's output unchanged. The stride divides the sides, rounded
    up.
    """

    def __init__(
        self,
        channels_before: int,
        channels_last: int,
        channels: int,
        genotype: Genotype,
        is_after_reduction: bool,
        is_last: bool,
        norm: str,
    ) -> None:
        super().__init__()
        self.reduce_last = _activated_conv(channels_last, channels, norm)
        self.reduce_before: nn.Module = nn.Identity()
        if is_after_reduction:
            self.reduce_before = FactorizedReduction(channels_before, channels, norm)
        elif channels_before != channels:
            self.reduce_before = _activated_conv(channels_before, channels, norm)
        self.indices = [(left, right) for (_, left), (_, right) in genotype.pairs]
        self.pairs = nn.ModuleList(
            nn.ModuleList(
                _OPERATIONS[operation](channels, genotype.stride if state < 2 else 1, norm)
                for operation, state in pair
            )
            for pair in genotype.pairs
        )
        self.joined = genotype.joined
        self.is_last = is_last
        self.output_names = () if is_last else ("cell", "before")

    def forward(self, last: Tensor, before: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        states = [self.reduce_last(last), self.reduce_before(last if before is None else before)]
        for pair, (left, right) in zip(self.pairs, self.indices, strict=True):
            assert isinstance(pair, nn.ModuleList)
            of_left, of_right = pair
            states.append(of_left(states[left]) + of_right(states[right]))
        out = torch.cat([states[index] for index in self.joined], dim=1)
        return out if self.is_last else (out, last)


class FactorizedReduction(nn.Module):
    """ReLU, two 1x1 convolutions of stride 2 (one shifted by a pixel) concatenated, and a norm.

    Input (N, in_channels, H, W), output (N, out_channels, ceil(H / 2), ceil(W / 2)).
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        super().__init__()
        self.even = conv2d(in_channels, out_channels // 2, 1, 2, norm)
        self.odd = conv2d(in_channels, out_channels - out_channels // 2, 1, 2, norm)
        self.norm = norm2d(norm, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(x)
        shifted = functional.pad(active, (-1, 1, -1, 1))
        out: Tensor = self.norm(torch.cat([self.even(active), self.odd(shifted)], dim=1))
        return out


def _activated_conv(
    in_channels: int,
    out_channels: int,
    norm: str,
    kernel: int | tuple[int, int] = 1,
    stride: int = 1,
) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(),
        conv2d(in_channels, out_channels, kernel, stride, norm),
        norm2d(norm, out_channels),
    )


def _bottleneck(
    channels: int, stride: int, norm: str, *kernels: int | tuple[int, int]
) -> nn.Sequential:
    inner = channels // _BOTTLENECK
    strides = [stride, *[1] * (len(kernels) - 1)]
    return nn.Sequential(
        _activated_conv(channels, inner, norm),
        *(
            _activated_conv(inner, inner, norm, kernel, step)
            for kernel, step in zip(kernels, strides, strict=True)
        ),
        _activated_conv(inner, channels, norm),
    )


_OPERATIONS: dict[str, Callable[[int, int, str], nn.Module]] = {
    "none": lambda channels, stride, norm: (
        FactorizedReduction(channels, channels, norm) if stride > 1 else nn.Identity()
    ),
    "conv1x1": lambda channels, stride, norm: _activated_conv(channels, channels, norm, 1, stride),
    "conv3x3": lambda channels, stride, norm: _bottleneck(channels, stride, norm, 3),
    "conv1x7_7x1": lambda channels, stride, norm: _bottleneck(
        channels, stride, norm, (1, 7), (7, 1)
    ),
    "max2x2": lambda channels, stride, norm: nn.MaxPool2d(2, stride, ceil_mode=True),
    "max3x3": lambda channels, stride, norm: nn.MaxPool2d(3, stride, padding=1),
    "average3x3": lambda channels, stride, norm: nn.AvgPool2d(
        3, stride, padding=1, count_include_pad=False
    ),
}

"""The parts of a simplified U-Net, each a layer that passes on the skips.

Each takes (main, skip1, skip2, ...) and returns such a tuple; `carried` are the names of the skips
that it returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

_SLOPE = 0.01


class Carrying(nn.Module):
    """A module for the first tensor; the others pass unchanged.

    Input (N, C, H, W), output (N, C', H', W') by the module.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], carried: tuple[str, ...]) -> None:
        super().__init__()
        self.run = run
        self.output_names = ("main", *carried) if carried else ()

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        out = self.run(x)
        return (out, *skips) if skips else out


class Conv3x3(Carrying):
    """A 3x3 convolution without bias."""

    def __init__(self, in_channels: int, out_channels: int, carried: tuple[str, ...]) -> None:
        super().__init__(nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), carried)


class Dropout(Carrying):
    """Dropout of whole channels."""

    def __init__(self, rate: float, carried: tuple[str, ...]) -> None:
        super().__init__(nn.Dropout2d(rate), carried)


class Norm(Carrying):
    """Instance norm without parameters."""

    def __init__(self, channels: int, carried: tuple[str, ...]) -> None:
        super().__init__(nn.InstanceNorm2d(channels), carried)


class Leaky(Carrying):
    """Leaky ReLU."""

    def __init__(self, carried: tuple[str, ...]) -> None:
        super().__init__(nn.LeakyReLU(_SLOPE), carried)


class Halve(Carrying):
    """A 2x2 max pooling; the sides are halved and rounded down."""

    def __init__(self, carried: tuple[str, ...]) -> None:
        super().__init__(nn.MaxPool2d(2), carried)


class Double(Carrying):
    """An upsampling by 2 to the nearest pixel."""

    def __init__(self, carried: tuple[str, ...]) -> None:
        super().__init__(nn.Upsample(scale_factor=2), carried)


class Keep(nn.Module):
    """The first tensor, which also becomes the last skip."""

    def __init__(self, carried: tuple[str, ...]) -> None:
        super().__init__()
        self.output_names = ("main", *carried)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return x, *skips, x


class Attach(nn.Module):
    """The first tensor, padded with zeros to the last skip and concatenated with it.

    Input (N, C, H, W), output (N, C + channels of the skip, H', W') at the size of the skip.
    """

    def __init__(self, carried: tuple[str, ...]) -> None:
        super().__init__()
        self.output_names = ("main", *carried) if carried else ()

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        *others, skip = skips
        rows, columns = (skip.shape[axis] - x.shape[axis] for axis in (2, 3))
        padded = functional.pad(x, (0, columns, 0, rows)) if rows or columns else x
        out = torch.cat([padded, skip], dim=1)
        return (out, *others) if others else out

"""The layers of U-Net that begin or end a skip (Ronneberger et al. 2015, arXiv 1505.04597).

Each layer takes (main, skip1, skip2, ...) and returns such a tuple with one skip more or less.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

_FACTOR = 2


class Descend(nn.Module):
    """A 2x2 max pooling whose input becomes the last skip, named by the last of `names`.

    Input (N, C, H, W), output (N, C, ceil(H / 2), ceil(W / 2)).
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.output_names = ("main", *names)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return functional.max_pool2d(x, _FACTOR, ceil_mode=True), *skips, x


class Ascend(nn.Module):
    """A 2x2 up-convolution, cropped to the last skip and concatenated after it.

    `names` are the names of the other skips. Input (N, in_channels, H, W), output (N, 2 *
    out_channels, H', W') at the size of the skip.
    """

    def __init__(self, in_channels: int, out_channels: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(in_channels, out_channels, _FACTOR, _FACTOR)
        # each output pixel depends on one input pixel, and no ReLU follows
        nn.init.normal_(self.widen.weight, std=math.sqrt(1 / in_channels))
        nn.init.zeros_(self.widen.bias)  # type: ignore[arg-type]
        self.output_names = ("main", *names) if names else ()

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        *others, skip = skips
        wide = self.widen(x)[:, :, : skip.shape[2], : skip.shape[3]]
        out = torch.cat([skip, wide], dim=1)
        return (out, *others) if others else out


class DenseHead(nn.Module):
    """A 1x1 convolution to the logits of each pixel.

    Input (N, in_channels, H, W), output logits (N, num_classes, H, W).
    """

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class PixelHead(DenseHead):
    """The mean of the pixels' logits over the image.

    Input (N, in_channels, H, W), output logits (N, num_classes).
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(dim=(2, 3))

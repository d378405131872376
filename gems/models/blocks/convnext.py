"""The layers of ConvNeXt (Liu et al. 2022, arXiv 2201.03545).

They use norms over channels and a linear map for each pixel.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import torch
from torch import Tensor, nn

from gems.models.blocks.parts import LAYER_NORM_EPS, LayerNorm2d, StochasticDepth, dropout

# ratio of the channels inside a block to those outside
_EXPANSION = 4
_WEIGHT_STD = 0.02
Map = TypeVar("Map", nn.Conv2d, nn.Linear)


class Stem(nn.Sequential):
    """A convolution of patches that do not overlap, and a norm.

    Input (N, in_channels, H, W), output (N, out_channels, floor(H / side_px), floor(W / side_px)).
    """

    def __init__(self, in_channels: int, out_channels: int, side_px: int) -> None:
        conv = _initialized(nn.Conv2d(in_channels, out_channels, side_px, side_px))
        super().__init__(OrderedDict(conv=conv, norm=LayerNorm2d(out_channels)))


class Downsample(nn.Sequential):
    """A norm and a 2x2 convolution of stride 2.

    Input (N, in_channels, H, W), output (N, out_channels, floor(H / 2), floor(W / 2)).
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        conv = _initialized(nn.Conv2d(in_channels, out_channels, 2, 2))
        super().__init__(OrderedDict(norm=LayerNorm2d(in_channels), conv=conv))


class Block(nn.Module):
    """A residual block: a depthwise 7x7 convolution, a norm, and two linear maps with GELU between.

    Input and output (N, channels, H, W). The branch has a scale per channel, initially 1e-6
    (Touvron et al. 2021, arXiv 2103.17239). A share `drop_rate` of the samples skips the branch.
    """

    def __init__(self, channels: int, drop_rate: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))
        self.depthwise = _initialized(nn.Conv2d(channels, channels, 7, padding=3, groups=channels))
        self.norm = nn.LayerNorm(channels, LAYER_NORM_EPS)
        self.wide = _initialized(nn.Linear(channels, _EXPANSION * channels))
        self.activation = nn.GELU()
        self.narrow = _initialized(nn.Linear(_EXPANSION * channels, channels))
        self.depth = StochasticDepth(drop_rate) if drop_rate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        branch = self.narrow(self.activation(self.wide(branch))).permute(0, 3, 1, 2)
        out: Tensor = x + self.depth(self.scale * branch)
        return out


class NormedHead(nn.Module):
    """Global average pooling, a norm, dropout and one linear map.

    Input (N, in_channels, H, W), output logits (N, num_classes).
    """

    def __init__(self, in_channels: int, num_classes: int, dropout_rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_channels, LAYER_NORM_EPS)
        self.dropout = dropout(dropout_rate)
        self.linear = _initialized(nn.Linear(in_channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.dropout(self.norm(x.mean(dim=(2, 3)))))
        return out


def _initialized(layer: Map) -> Map:
    nn.init.trunc_normal_(layer.weight, std=_WEIGHT_STD)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer

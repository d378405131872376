"""Convolution, linear map and norm as all blocks make them.

Weights before a ReLU are drawn as in He et al. 2015 (arXiv 1502.01852): normal with variance 2 / fan-in, biases zero.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn

LAYER_NORM_EPS = 1e-6  # that of ConvNeXt; torch's is 1e-5
_MAX_GROUPS = 8


def conv2d(
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, int],
    stride: int,
    norm: str,
    padding: int | tuple[int, int] | None = None,
) -> nn.Conv2d:
    """Return a convolution, padded to keep the size unless `padding` is given; with a bias where no norm has one."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    pad = (height // 2, width // 2) if padding is None else padding
    conv = nn.Conv2d(in_channels, out_channels, (height, width), stride, padding=pad, bias=norm == "none")
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def hidden_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear map that a ReLU follows."""
    linear = nn.Linear(in_features, out_features)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return linear


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm by the running statistics in training too, as in fine-tuning with few images at a time.

    Unlike torchvision's of that name its weight and bias are trained, unless optimizer.frozen says otherwise.
    """

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation."""
        return super().train(False)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of each pixel, as in ConvNeXt (Liu et al. 2022, arXiv 2201.03545)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, LAYER_NORM_EPS)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a feature map, (samples, channels, height, width)."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm2d(norm: str, channels: int) -> nn.Module:
    """Return the norm of a feature map by its name in `model.norm`.

    That is "batch", "frozen_batch" (by running statistics), "group" (8 groups, or as many as divide the channels),
    "layer" (over channels) or "none".
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "frozen_batch":
        return FrozenBatchNorm2d(channels).train()
    if norm == "layer":
        return LayerNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(_MAX_GROUPS, channels), channels)
    return nn.Identity()


def dropout(rate: float) -> nn.Module:
    """Return dropout of a share `rate` of the values; nothing at all for 0."""
    return nn.Dropout(rate) if rate else nn.Identity()


class StochasticDepth(nn.Module):
    """Drop a residual branch for a share `p` of the samples (Huang et al. 2016, arXiv 1603.09382)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training:
            return branch
        kept = torch.empty((len(branch), 1, 1, 1), dtype=branch.dtype, device=branch.device).bernoulli_(1 - self.p)
        return branch * kept / (1 - self.p)


def tame(last: nn.Conv2d, norm: str, num_blocks: int) -> None:
    """Shrink a branch that no norm tames, or the variance would double at each of `num_blocks` blocks.

    Frozen statistics are those of no data until weights are loaded.
    """
    if norm in ("none", "frozen_batch"):
        with torch.no_grad():
            last.weight.mul_(num_blocks**-0.5)

"""The blocks of residual networks (He et al. 2015, arXiv 1512.03385; 2016, arXiv 1603.05027).

A bottleneck block that shrinks its map does so in its first 1x1 convolution, as published.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.models.blocks.parts import RELU_GAIN, conv2d, norm2d, tame


class _ResidualBlock(nn.Module):
    """A residual block.

    `channels` are those of the input, inside and of the output. Input (N, channels[0], H, W),
    output (N, channels[2], ceil(H / stride), ceil(W / stride)). Without a normalizer, `scales` are
    the standard deviation of the input that convolutions expect, and the factor of the branch.
    """

    is_preactivated: ClassVar[bool]

    def __init__(
        self,
        channels: tuple[int, int, int],
        stride: int,
        bottleneck: bool,
        shortcut: str,
        norm: str,
        num_blocks: int,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        in_channels, inner_channels, out_channels = channels
        input_std, self.branch_scale = scales
        first_scale = RELU_GAIN / input_std
        if bottleneck:
            convs = [
                conv2d(in_channels, inner_channels, 1, stride, norm, scale=first_scale),
                conv2d(inner_channels, inner_channels, 3, 1, norm, scale=RELU_GAIN),
                conv2d(inner_channels, out_channels, 1, 1, norm, scale=RELU_GAIN),
            ]
        else:
            convs = [
                conv2d(in_channels, inner_channels, 3, stride, norm, scale=first_scale),
                conv2d(inner_channels, out_channels, 3, 1, norm, scale=RELU_GAIN),
            ]
        steps: list[nn.Module] = [convs[0]]
        for previous, conv in pairwise(convs):
            steps += [norm2d(norm, previous.out_channels), nn.ReLU(), conv]
        if self.is_preactivated:
            self.activation = nn.Sequential(norm2d(norm, in_channels), nn.ReLU())
        else:
            steps.append(norm2d(norm, out_channels))
        self.branch = nn.Sequential(*steps)
        self.shortcut: nn.Module = nn.Identity()
        self.projects = False
        if in_channels != out_channels or stride != 1:
            if shortcut == "identity":
                self.shortcut = Subsample(stride, out_channels - in_channels)
            else:
                self.projects = True
                projection: list[nn.Module] = [
                    conv2d(in_channels, out_channels, 1, stride, norm, scale=first_scale)
                ]
                projection += [] if self.is_preactivated else [norm2d(norm, out_channels)]
                self.shortcut = nn.Sequential(*projection)
        tame(convs[-1], norm, num_blocks)


class PostActivationBlock(_ResidualBlock):
    """A residual block of version 1: relu(shortcut(x) + branch(x)), He et al. 2015, figure 5."""

    is_preactivated = False

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.shortcut(x) + self.branch(x))


class PreActivationBlock(_ResidualBlock):
    """A residual block of version 2: shortcut + branch_scale * branch(relu(norm(x))).

    Source: He et al. 2016, figure 4e. A projection reads the activated input, which it shares with
    the branch; an identity reads x itself. A normalizer-free ResNet (Brock et al. 2021, section 3)
    works in the same way; its division by the input's standard deviation is part of the convolutions' scale.
    """

    is_preactivated = True

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(x)
        kept = self.shortcut(active if self.projects else x)
        return torch.add(kept, self.branch(active), alpha=self.branch_scale)


class Subsample(nn.Module):
    """The parameter-free shortcut "option A" of He et al. 2015.

    It takes every `stride`-th pixel and appends zero channels. Input (N, C, H, W), output (N, C +
    new_channels, ceil(H / stride), ceil(W / stride)).
    """

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels)
        )

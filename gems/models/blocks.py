"""The torch modules behind the ResNet layers (He et al. 2015, arXiv 1512.03385; 2016, arXiv 1603.05027).

No module works in place: a block's input is the leaf of its stage, and an executor may keep or move
activations. Weights are drawn as in He et al. 2015 (arXiv 1502.01852): normal with variance 2 / fan-in.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

_MAX_GROUPS = 8


class Stem(nn.Module):
    """A 3x3 convolution from the image's channels, followed by norm and ReLU when `activate` (version 1).

    Takes (N, in_channels, H, W) and gives (N, out_channels, H, W).
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str, activate: bool) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels, 3, 1, norm)
        self.activation = nn.Sequential(_norm(norm, out_channels), nn.ReLU()) if activate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Gives the first feature map."""
        out: Tensor = self.activation(self.conv(x))
        return out


class PostActivationBlock(nn.Module):
    """A residual block of version 1: relu(shortcut(x) + branch(x)), He et al. 2015, figure 5.

    Takes (N, in_channels, H, W) and gives (N, out_channels, ceil(H / stride), ceil(W / stride)).
    """

    def __init__(
        self,
        in_channels: int,
        inner_channels: int,
        out_channels: int,
        stride: int,
        bottleneck: bool,
        shortcut: str,
        norm: str,
        num_blocks: int,
    ) -> None:
        super().__init__()
        convs = _branch_convs(in_channels, inner_channels, out_channels, stride, bottleneck, norm)
        steps: list[nn.Module] = []
        for conv in convs:
            steps += [conv, _norm(norm, conv.out_channels), nn.ReLU()]
        self.branch = nn.Sequential(*steps[:-1])
        self.shortcut = _shortcut(in_channels, out_channels, stride, shortcut, norm, normed=True)
        _tame(convs[-1], norm, num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Gives the block's output."""
        return functional.relu(self.shortcut(x) + self.branch(x))


class PreActivationBlock(nn.Module):
    """A residual block of version 2: shortcut + branch(relu(norm(x))), He et al. 2016, figure 4e.

    A projection reads the activated input, which it shares with the branch; an identity reads x itself.
    Shapes as in PostActivationBlock.
    """

    def __init__(
        self,
        in_channels: int,
        inner_channels: int,
        out_channels: int,
        stride: int,
        bottleneck: bool,
        shortcut: str,
        norm: str,
        num_blocks: int,
    ) -> None:
        super().__init__()
        convs = _branch_convs(in_channels, inner_channels, out_channels, stride, bottleneck, norm)
        steps: list[nn.Module] = [convs[0]]
        for previous, conv in pairwise(convs):
            steps += [_norm(norm, previous.out_channels), nn.ReLU(), conv]
        self.activation = nn.Sequential(_norm(norm, in_channels), nn.ReLU())
        self.branch = nn.Sequential(*steps)
        self.shortcut = _shortcut(in_channels, out_channels, stride, shortcut, norm, normed=False)
        self.projects = isinstance(self.shortcut, nn.Sequential)
        _tame(convs[-1], norm, num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Gives the block's output."""
        active = self.activation(x)
        out: Tensor = self.shortcut(active if self.projects else x) + self.branch(active)
        return out


class Subsample(nn.Module):
    """The parameter-free shortcut "option A" of He et al. 2015: every `stride`-th pixel, zero channels."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Gives (N, C + new_channels, ceil(H / stride), ceil(W / stride))."""
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class Head(nn.Module):
    """Norm and ReLU when `activate` (version 2), global average pooling, one linear map.

    Takes (N, in_channels, H, W) and gives logits (N, num_classes): the loss applies its own log-softmax.
    """

    def __init__(self, in_channels: int, num_classes: int, norm: str, activate: bool) -> None:
        super().__init__()
        self.activation = nn.Sequential(_norm(norm, in_channels), nn.ReLU()) if activate else nn.Identity()
        self.linear = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Gives the logits."""
        out: Tensor = self.linear(self.activation(x).mean(dim=(2, 3)))
        return out


def _branch_convs(
    in_channels: int, inner_channels: int, out_channels: int, stride: int, bottleneck: bool, norm: str
) -> list[nn.Conv2d]:
    if bottleneck:
        return [
            _conv(in_channels, inner_channels, 1, stride, norm),
            _conv(inner_channels, inner_channels, 3, 1, norm),
            _conv(inner_channels, out_channels, 1, 1, norm),
        ]
    return [
        _conv(in_channels, inner_channels, 3, stride, norm),
        _conv(inner_channels, out_channels, 3, 1, norm),
    ]


def _shortcut(
    in_channels: int, out_channels: int, stride: int, shortcut: str, norm: str, normed: bool
) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    if shortcut == "identity":
        return Subsample(stride, out_channels - in_channels)
    conv = _conv(in_channels, out_channels, 1, stride, norm)
    return nn.Sequential(conv, _norm(norm, out_channels)) if normed else nn.Sequential(conv)


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int, norm: str) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=norm == "none")
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def _norm(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(_MAX_GROUPS, channels), channels)
    return nn.Identity()


def _tame(last: nn.Conv2d, norm: str, num_blocks: int) -> None:
    """Shrinks a branch that no norm tames, or the variance would double at each of `num_blocks` blocks."""
    if norm == "none":
        with torch.no_grad():
            last.weight.mul_(num_blocks**-0.5)

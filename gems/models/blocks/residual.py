"""The blocks of residual networks (He et al. 2015, arXiv 1512.03385; 2016, arXiv 1603.05027).

A bottleneck that shrinks its map does so in its first 1x1 convolution, as published.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from gems.models.blocks.parts import conv2d, norm2d, tame


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
            steps += [conv, norm2d(norm, conv.out_channels), nn.ReLU()]
        self.branch = nn.Sequential(*steps[:-1])
        self.shortcut = _shortcut(in_channels, out_channels, stride, shortcut, norm, normed=True)
        tame(convs[-1], norm, num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
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
            steps += [norm2d(norm, previous.out_channels), nn.ReLU(), conv]
        self.activation = nn.Sequential(norm2d(norm, in_channels), nn.ReLU())
        self.branch = nn.Sequential(*steps)
        self.shortcut = _shortcut(in_channels, out_channels, stride, shortcut, norm, normed=False)
        self.projects = isinstance(self.shortcut, nn.Sequential)
        tame(convs[-1], norm, num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
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
        """Return (N, C + new_channels, ceil(H / stride), ceil(W / stride))."""
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def _branch_convs(
    in_channels: int, inner_channels: int, out_channels: int, stride: int, bottleneck: bool, norm: str
) -> list[nn.Conv2d]:
    if bottleneck:
        return [
            conv2d(in_channels, inner_channels, 1, stride, norm),
            conv2d(inner_channels, inner_channels, 3, 1, norm),
            conv2d(inner_channels, out_channels, 1, 1, norm),
        ]
    return [conv2d(in_channels, inner_channels, 3, stride, norm), conv2d(inner_channels, out_channels, 3, 1, norm)]


def _shortcut(in_channels: int, out_channels: int, stride: int, shortcut: str, norm: str, normed: bool) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    if shortcut == "identity":
        return Subsample(stride, out_channels - in_channels)
    conv = conv2d(in_channels, out_channels, 1, stride, norm)
    return nn.Sequential(conv, norm2d(norm, out_channels)) if normed else nn.Sequential(conv)

"""A layer that runs steps one after another: convolutions, poolings and forks into branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gems.models.blocks.parts import conv2d, norm2d
from gems.models.steps import Conv, Fork, LocalNorm, Pool, Step, channels_after


class ConvUnit(nn.Module):
    """A convolution, followed by norm and ReLU when `activate`.

    Takes (N, in_channels, H, W) and gives (N, out_channels, H', W'); without `padding` an odd kernel gives
    H' = ceil(H / stride).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        stride: int,
        norm: str,
        activate: bool = True,
        padding: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.conv = conv2d(in_channels, out_channels, kernel, stride, norm, padding)
        self.activation = nn.Sequential(norm2d(norm, out_channels), nn.ReLU()) if activate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map."""
        out: Tensor = self.activation(self.conv(x))
        return out


class Branches(nn.Module):
    """Branches over one input (N, C, H, W), joined along the channels."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, sum of the branches' channels, H', W')."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Chain(nn.Module):
    """Runs `steps` on its first tensor and hands on the tensors named in `carried` as they are.

    Takes (N, in_channels, H, W), and gives (N, C', H', W') as the steps say.
    """

    def __init__(self, in_channels: int, steps: tuple[Step, ...], norm: str, carried: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.steps = _run(in_channels, steps, norm)
        self.output_names = ("main", *carried) if carried else ()

    def forward(self, x: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the feature map, and what is carried."""
        out: Tensor = self.steps(x)
        return (out, *carried) if carried else out


def _run(in_channels: int, steps: Sequence[Step], norm: str) -> nn.Sequential:
    made: list[nn.Module] = []
    for step in steps:
        made.append(_module(in_channels, step, norm))
        in_channels = channels_after(in_channels, (step,))
    return nn.Sequential(*made)


def _module(in_channels: int, step: Step, norm: str) -> nn.Module:
    if isinstance(step, Conv):
        return ConvUnit(in_channels, step.channels, step.kernel, step.stride, norm, padding=step.padding)
    if isinstance(step, Fork):
        return Branches([_run(in_channels, branch, norm) for branch in step.branches])
    if isinstance(step, LocalNorm):
        return nn.LocalResponseNorm(step.channels)
    assert isinstance(step, Pool)
    pool = nn.MaxPool2d if step.how == "max" else nn.AvgPool2d
    return pool(step.kernel, step.stride, step.padding)

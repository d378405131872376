"""A network as a user would write it.

A small U-Net with a classifier, in no way made for this toolkit.
Its skips cross every cut, a size read at the beginning is used at the end, and its activations work
in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class TwoConvs(nn.Module):
    """Two convolutions, each with a norm and an activation in place, of an input that is changed in place."""

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.first_norm = _norm(norm, out_channels)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.second_norm = _norm(norm, out_channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x += 0.01
        x = self.activation(self.first_norm(self.first(x)))
        return self.activation(self.second_norm(self.second(x)))


class OwnUNet(nn.Module):
    """An encoder and a decoder of `depth` levels whose pixels vote on the image's class."""

    def __init__(
        self,
        width: int = 8,
        depth: int = 2,
        in_channels: int = 3,
        num_classes: int = 2,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            TwoConvs(before, after, norm)
            for before, after in zip([in_channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = TwoConvs(widths[-2], widths[-1], norm)
        self.up = nn.ModuleList(
            TwoConvs(deep + shallow, shallow, norm)
            for deep, shallow in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.gate = nn.Parameter(torch.full((width, 1, 1), 0.5))
        self.logits = nn.Conv2d(width, num_classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        skips = []
        x = image
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = functional.interpolate(x, size=skip.shape[-2:])
            x = block(torch.cat([x, skip], dim=1))
        x = x * torch.sigmoid(self.gate)
        votes = self.logits(x).sum(dim=(2, 3))
        return votes / (height * width)


def _norm(norm: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(4, channels)


def make_unet(width: int = 4) -> nn.Module:
    """A function that gives a network, instead of a class."""
    return OwnUNet(width=width)

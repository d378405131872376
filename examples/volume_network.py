"""A small U-Net in three dimensions, which gives the class of each voxel.

`model.target=examples.volume_network.VolumeUNet data.depth_px=16 data.task=segmentation`
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VolumeUNet(nn.Module):
    """An encoder and a decoder of `depth` levels; the first has `width` channels, each next twice.

    A side of the volume is a multiple of 2 ** depth. Without batch norm (norm="none"), the network
    also runs in blocks of a volume.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 2,
        width: int = 8,
        depth: int = 2,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            convolutions(before, after, norm)
            for before, after in zip([in_channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.pool = nn.MaxPool3d(2)
        self.bottom = convolutions(widths[-2], widths[-1], norm)
        self.widen = nn.ModuleList(
            nn.ConvTranspose3d(deep, shallow, 2, stride=2)
            for deep, shallow in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.up = nn.ModuleList(
            convolutions(2 * shallow, shallow, norm) for shallow in widths[-2::-1]
        )
        self.head = nn.Conv3d(width, num_classes, 1)

    def forward(self, volume: Tensor) -> Tensor:
        """Return the logits (N, num_classes, D, H, W) of volumes (N, in_channels, D, H, W)."""
        x = volume
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([widen(x), skips.pop()], 1))
        return self.head(x)


def convolutions(in_channels: int, out_channels: int, norm: str) -> nn.Sequential:
    """Return two convolutions, each with ReLU, and with batch norm if `norm` is "batch"."""
    steps: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        steps.append(nn.Conv3d(channels, out_channels, 3, padding=1))
        steps += [nn.BatchNorm3d(out_channels)] if norm == "batch" else []
        steps.append(nn.ReLU())
    return nn.Sequential(*steps)

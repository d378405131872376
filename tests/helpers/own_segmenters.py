"""Networks as users write them that give a score for each pixel, in no way made for this toolkit."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

Outputs = namedtuple("Outputs", ["main", "auxiliary"])


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(True),
    )


class Encoder(nn.Module):
    """An encoder whose maps of all levels are a list, as those of segmentation_models.pytorch."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        channels = [3, *(width << level for level in range(depth))]
        self.stages = nn.ModuleList(
            conv_block(before, after) for before, after in pairwise(channels)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
            x = functional.max_pool2d(x, 2)
        return features


class Decoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in reversed(range(depth))]
        self.blocks = nn.ModuleList(
            conv_block(deep + shallow, shallow) for deep, shallow in pairwise(widths)
        )

    def forward(self, *features: Tensor) -> Tensor:
        x, *skips = features[::-1]
        for block, skip in zip(self.blocks, skips, strict=True):
            x = functional.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1))
        return x


class OwnSegmenter(nn.Module):
    """A U-Net of encoder, decoder and head."""

    def __init__(self, num_classes: int = 2, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.encoder = Encoder(width, depth)
        self.decoder = Decoder(width, depth)
        self.head = nn.Conv2d(width, num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(*self.encoder(x)))


class WithDict(nn.Module):
    """A segmenter with a dict of two maps, as torchvision's DeepLab with an auxiliary classifier."""

    def __init__(self, num_classes: int = 2, width: int = 4) -> None:
        super().__init__()
        self.stem, self.body = conv_block(3, width), conv_block(width, width)
        self.aux = nn.Conv2d(width, num_classes, 1)
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size = x.shape[-2:]
        low = functional.max_pool2d(self.stem(x), 2)
        high = self.body(low)
        result = OrderedDict()
        result["out"] = functional.interpolate(
            self.classifier(high), size=size, mode="bilinear", align_corners=False
        )
        result["aux"] = functional.interpolate(
            self.aux(low), size=size, mode="bilinear", align_corners=False
        )
        return result


class WithTuple(nn.Module):
    """A segmenter with a named tuple in training and one tensor in evaluation, as torchvision's GoogLeNet."""

    def __init__(self, num_classes: int = 2, width: int = 4) -> None:
        super().__init__()
        self.stem = conv_block(3, width)
        self.auxiliary = nn.Conv2d(width, num_classes, 1)
        self.body = conv_block(width, width)
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor | Outputs:
        x = self.stem(x)
        auxiliary = self.auxiliary(x) if self.training else None
        x = self.classifier(self.body(x))
        return Outputs(x, auxiliary) if auxiliary is not None else x

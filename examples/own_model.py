"""A network of one's own: `model.target=examples.own_model.TileNet model.kwargs={width:8}`.

Any module that takes images (N, channels, height, width) and returns logits (N, classes) will do.
It is traced between its blocks, and cut there; the tensor that skips a block, `shortcut`, is
carried to the stage that adds it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, which halve the sides of the map."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(image)))))


class TileNet(nn.Module):
    """Three blocks, a skip over the second, and a classifier; any image of 8 x 8 px or more."""

    def __init__(self, width: int = 16, num_classes: int = 2) -> None:
        super().__init__()
        self.down1 = Block(3, width)
        self.down2 = Block(width, 2 * width)
        self.down3 = Block(2 * width, 2 * width)
        self.skip = nn.Conv2d(width, 2 * width, 1, stride=2)
        self.classify = nn.Linear(2 * width, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        first = self.down1(image)
        shortcut = self.skip(first)
        third = self.down3(self.down2(first) + shortcut)
        return self.classify(third.mean(dim=(2, 3)))

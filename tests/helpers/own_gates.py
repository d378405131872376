"""A user's small network with a gate between convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(torch.sigmoid(self.conv(x)), 3, 1, 1) * x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.gate = Gate()
        self.down = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.down(self.gate(self.stem(x))).mean((2, 3)))

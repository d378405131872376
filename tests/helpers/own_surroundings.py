"""A user's network that freezes its stem in the forward that is cut into layers, and perhaps reverses a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


class FrozenStem(nn.Module):
    def __init__(self, is_reversed: bool = False, is_hooked: bool = False) -> None:
        super().__init__()
        self.is_reversed = is_reversed
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.body = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.head = nn.Linear(4, 2)
        if is_hooked:
            self.register_forward_hook(lambda module, given, made: made * 2)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = torch.relu(self.stem(x) + 1)
        if self.is_reversed:
            x = Reversed.apply(x)
        return self.head(self.body(x).mean((2, 3)))

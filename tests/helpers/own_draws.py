"""Networks of a user's own whose modules draw random numbers in many ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Noise(nn.Module):
    """Adds Gaussian noise, with no rate that could be read from outside."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class RandomDepth(nn.Module):
    """A block that half of all samples skip, under another name for its rate than libraries use."""

    def __init__(self, width: int, survival: float = 0.5) -> None:
        super().__init__()
        self.survival = survival
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.RReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        branch = self.inner(x)
        if self.training:
            branch = (
                branch
                * (torch.rand(len(x), 1, 1, 1, device=x.device) < self.survival)
                / self.survival
            )
        return x + branch


class Drops(nn.Module):
    """Drops values in its own forward, between two layers and behind them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 1)
        self.drop = nn.Dropout2d(0.3)
        self.second = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(torch.tanh(self.first(x)), 0.2, self.training)
        return x + functional.dropout(self.second(self.drop(x)), 0.4, self.training)


class Attends(nn.Module):
    """Attention over pixels, with dropout of its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return x + mixed.transpose(1, 2).reshape(x.shape)


class Random(nn.Module):
    """One of each, so that every layer draws."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, stride=2), Noise())
        self.depth = RandomDepth(width)
        self.drops = Drops(width)
        self.attends = Attends(width)
        self.again = RandomDepth(width, 0.7)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.again(self.attends(self.drops(self.depth(self.stem(image)))))
        return self.head(self.drop(x.mean(dim=(2, 3))))

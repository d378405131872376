"""Networks of users whose forward needs more than tensors, or more than one batch of images."""

from __future__ import annotations

import einops
import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 2)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))


class Rearranges(_Net):
    """Calls einops by its name and through the package, with sizes that it reads from the map."""

    def forward(self, x: Tensor) -> Tensor:
        x = rearrange(self.stem(x), "n c h w -> n (h w) c")
        x = rearrange(x, "n (h w) c -> n c h w", h=9)
        x, shape = einops.pack([self.body(x)], "n c *")
        (x,) = einops.unpack(x, shape, "n c *")
        return self.head(einops.reduce(x, "n c h w -> n c", "mean"))


class ReadsSizes(_Net):
    """Computes with the sizes of a map as numpy arrays."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        half = np.array(x.shape[2:]) // 2
        x = nn.functional.adaptive_avg_pool2d(x, (int(half[0]), int(half[1])))
        return self.scores(self.body(x).reshape(len(half), -1, 8, half[0], half[1])[0])


class ReadsBatch(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.body(self.stem(x)) / np.array(x.shape)[0])  # the number


class ReadsValues(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.body(self.stem(x)) * np.asarray(x).max())  # the values


class TakesTwo(_Net):
    def forward(self, x: Tensor, meta: Tensor) -> Tensor:
        return self.scores(self.body(self.stem(x))) + meta


class TakesTwoByName(_Net):
    def forward(self, x: Tensor, *, meta: Tensor) -> Tensor:
        return self.scores(self.body(self.stem(x))) + meta


class TakesDict(_Net):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.scores(self.body(self.stem(batch["image"])))  # the key


class TakesOptional(_Net):
    def forward(self, x: Tensor, meta: Tensor | None = None) -> Tensor:
        return self.scores(self.body(self.stem(x))) if meta is None else meta


class AveragesAll(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None))

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.body(torch.relu(self.stem(x))))

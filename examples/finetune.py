"""Fine-tuning: a network that freezes its batch norm, and weights for it that are trained on another task.

`python -m examples.finetune FILE.safetensors` is a training script in plain torch: on one half of a
tissue picture it learns by how many quarters a tile is turned, and writes a state dict with a head
of four classes. conf/experiment/finetune.yaml starts from that file with a new head.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from skimage import data
from torch import Tensor, nn

SIDE_PX = 48
TILES = 24
STEPS = 80


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in a ResNet."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a feature map of a `stride` lower resolution."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Network(nn.Module):
    """A small ResNet.

    Frozen, its batch norm keeps the statistics, scale and shift that it is given.
    """

    def __init__(self, num_classes: int = 2, width: int = 16, is_frozen: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        widths = [width, width, 2 * width, 4 * width]
        self.blocks = nn.Sequential(*(Block(a, b, 2) for a, b in pairwise(widths)))
        self.fc = nn.Linear(widths[-1], num_classes)
        self.is_frozen = is_frozen
        if is_frozen:
            for norm in self.norms():
                norm.requires_grad_(False)

    def norms(self) -> list[nn.BatchNorm2d]:
        """Return all batch norms."""
        return [module for module in self.modules() if isinstance(module, nn.BatchNorm2d)]

    def train(self, mode: bool = True) -> Self:
        """Turn training on or off, for a frozen batch norm off."""
        super().train(mode)
        if self.is_frozen:
            for norm in self.norms():
                norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each class."""
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def main(path: Path) -> None:
    """Train with a batch norm that learns, and write the weights."""
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    half = data.immunohistochemistry()[:, :256]
    model = Network(num_classes=4, is_frozen=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        corners = draw.integers(0, [half.shape[0] - SIDE_PX, half.shape[1] - SIDE_PX], (TILES, 2))
        turns = draw.integers(0, 4, TILES)
        tiles = np.stack(
            [
                np.rot90(half[y : y + SIDE_PX, x : x + SIDE_PX], turn)
                for (y, x), turn in zip(corners, turns, strict=True)
            ]
        )
        images = (torch.from_numpy(tiles).permute(0, 3, 1, 2).float() - 127.5) / 64
        loss = functional.cross_entropy(model(images), torch.from_numpy(turns))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"{path}: step {step + 1}/{STEPS}  loss {loss.item():.3f}", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

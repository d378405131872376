"""A dataset of one's own: `data.target=examples.own_tiles.Tiles data.kwargs={root:FOLDER}`.

Any map-style `torch.utils.data.Dataset` that gives (image, label) will do. Its argument `split` (or
`train`) makes it give one split; `num_classes`, `class_counts` and `label` are optional. It may
draw random numbers: they depend on the seed, the sample and the epoch alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Tiles(Dataset[tuple[Tensor, int]]):
    """Tiles in ROOT/SPLIT.npy, uint8 of (N, C, H, W), which are mapped and not read, and labels in ROOT/SPLIT.csv."""

    def __init__(self, root: str, split: str) -> None:
        self.images = np.load(Path(root) / f"{split}.npy", mmap_mode="r")
        self.labels = np.loadtxt(Path(root) / f"{split}.csv", dtype=np.int64).tolist()
        self.num_classes = max(self.labels) + 1
        self.is_train = split == "train"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index] / np.float32(255)) - 0.5
        if self.is_train and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.label(index)

    def label(self, index: int) -> int:
        """Return a label without reading the image.

        On the last stage's ranks, which need no images.
        """
        return int(self.labels[index])

"""Define your own data set of tiles.

The tiles are one array, PATH/images.npy, uint8 of (N, C, H, W), with their classes in
PATH/labels.npy.

The arrays are mapped, not read: a rank touches only the tiles of its own micro-batches.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gems.config.schema import DataConfig
from gems.data.dataset import Dataset, Image, Split, dataset
from gems.errors import ConfigError


def check(data: DataConfig) -> None:
    """Refuse a folder that holds no such arrays, before a job is queued."""
    if data.path is None or not (Path(data.path) / "images.npy").is_file():
        raise ConfigError("data.path", data.path, "must be a folder with images.npy and labels.npy")


@dataset("npy", check=check, counts_itself=True)
class NpyTiles(Dataset):
    """The last quarter of the tiles is for validation."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        check(data)
        self._images = np.load(Path(str(data.path)) / "images.npy", mmap_mode="r")
        self._labels = np.load(Path(str(data.path)) / "labels.npy")
        shape = (data.channels, data.height_px, data.width_px)
        if self._images.shape[1:] != shape:
            raise ConfigError(
                "data.path",
                data.path,
                f"has tiles of {self._images.shape[1:]}, and the keys say {shape}",
            )
        num_validation = len(self._images) // 4
        super().__init__(
            shape,
            data.num_classes,
            len(self._images) - num_validation,
            num_validation,
            seed,
            data.augment,
        )

    def _pixels(self, split: Split, index: int) -> Image:
        return (self._images[self._place(split, index)].astype(np.float32) - 127.5) / 64.0

    def _label(self, split: Split, index: int) -> int:
        return int(self._labels[self._place(split, index)])

    def _place(self, split: Split, index: int) -> int:
        return index if split == "train" else self.num_train + index

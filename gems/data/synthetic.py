"""Images from nothing: a class pattern under noise, for any shape, quick at any resolution."""

from __future__ import annotations

import numpy as np

from gems.config.schema import DataConfig
from gems.data.dataset import Dataset, Image, Split, dataset
from gems.data.rng import generator

_CELLS = 8
_NOISE_PX = 64
_SIGNAL = 0.6


@dataset("synthetic")
class SyntheticDataset(Dataset):
    """Classes are random patterns of 8 x 8 cells stretched over the image, under noise.

    A pattern looks the same after flips and quarter turns. An image is 0.6 x pattern + 0.8 x noise, so unit
    variance; classes take turns by index. The noise is one 64 px patch repeated from a random offset, which
    costs a copy and not a draw for each pixel.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        shape = (data.channels, data.height_px, data.width_px)
        super().__init__(shape, data.num_classes, data.train_samples, data.validation_samples, seed, data.augment)
        self._rows = np.arange(data.height_px) * _CELLS // data.height_px
        self._columns = np.arange(data.width_px) * _CELLS // data.width_px
        self._patterns = [self._pattern(number) for number in range(data.num_classes)]

    def _pattern(self, number: int) -> Image:
        rng = generator(self.seed, "pattern", number)
        cells = rng.standard_normal((self.shape[0], _CELLS, _CELLS))
        cells = cells + cells[:, ::-1, :]
        cells = cells + cells[:, :, ::-1]
        cells = cells + cells.transpose(0, 2, 1)
        return np.asarray(_SIGNAL * cells / cells.std(), dtype=np.float32)

    def _pixels(self, split: Split, index: int) -> Image:
        channels, height, width = self.shape
        rng = generator(self.seed, split, index)
        patch = rng.standard_normal((channels, _NOISE_PX, _NOISE_PX), dtype=np.float32)
        patch *= np.float32((1 - _SIGNAL**2) ** 0.5)
        top, left = rng.integers(_NOISE_PX, size=2)
        noise = patch[:, (np.arange(height) + top) % _NOISE_PX][:, :, (np.arange(width) + left) % _NOISE_PX]
        pattern = self._patterns[self._label(split, index)]
        noise += pattern[:, self._rows][:, :, self._columns]
        return noise

    def _label(self, split: Split, index: int) -> int:
        return index % self.num_classes

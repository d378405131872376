"""Synthetic samples: images of class patterns with noise, and tokens of a Markov chain."""

from __future__ import annotations

import numpy as np

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import Box, Dataset, Image, Label, Split, dataset, generator

_CELLS = 8
_NOISE_PX = 64
_SIGNAL = 0.6
_WHOLE = Box(slice(None), slice(None))


@dataset("synthetic", tasks=TASKS)
class SyntheticDataset(Dataset):
    """Images with random class patterns of 8 x 8 cells stretched over the image, plus noise.

    A pattern looks the same after flips and quarter turns. An image is 0.6 x pattern + 0.8 x noise,
    so it has unit variance; classes alternate by index. The noise is one 64 px patch repeated from
    a random offset, which costs a copy instead of a draw for each pixel. A mask is the class at
    pixels where its pattern is positive, and 0 elsewhere. For several labels or values, an image is
    the sum of the patterns weighted by the labels.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        shape = (data.channels, data.height_px, data.width_px)
        super().__init__(
            shape, data.num_classes, data.train_samples, data.validation_samples, seed, data.augment
        )
        self._rows = np.arange(data.height_px) * _CELLS // data.height_px
        self._columns = np.arange(data.width_px) * _CELLS // data.width_px
        self._patterns = [self._pattern(number) for number in range(data.num_classes)]
        self._task = data.task or TASKS[0]

    def _pattern(self, number: int) -> Image:
        rng = generator(self.seed, "pattern", number)
        cells = rng.standard_normal((self.shape[0], _CELLS, _CELLS))
        cells = cells + cells[:, ::-1, :]
        cells = cells + cells[:, :, ::-1]
        cells = cells + cells.transpose(0, 2, 1)
        return np.asarray(_SIGNAL * cells / cells.std(), dtype=np.float32)

    def _pixels(self, split: Split, index: int) -> Image:
        return self._part(split, index, _WHOLE)

    def reads_rows(self, split: Split) -> bool:
        """Return True, because any part can be generated alone."""
        return True

    def _write(self, split: Split, index: int, box: Box, out: Image) -> None:
        out[...] = self._part(split, index, box)

    def _part(self, split: Split, index: int, box: Box) -> Image:
        channels, height, width = self.shape
        rng = generator(self.seed, split, index)
        patch = rng.standard_normal((channels, _NOISE_PX, _NOISE_PX), dtype=np.float32)
        patch *= np.float32((1 - _SIGNAL**2) ** 0.5)
        top, left = rng.integers(_NOISE_PX, size=2)
        rows = np.arange(height)[box.rows]
        columns = np.arange(width)[box.columns]
        noise: Image = patch[:, (rows + top) % _NOISE_PX][:, :, (columns + left) % _NOISE_PX]
        label = self._label(split, index)
        if isinstance(label, np.ndarray) and label.ndim == 1:
            pattern = np.tensordot(label, np.stack(self._patterns), 1).astype(np.float32)
        else:
            pattern = self._patterns[index % self.num_classes]
        noise += self._stretched(pattern, box)
        return noise

    def _stretched(self, pattern: Image, box: Box = _WHOLE) -> Image:
        stretched: Image = pattern[:, self._rows[box.rows]][:, :, self._columns[box.columns]]
        return stretched

    def _label(self, split: Split, index: int) -> Label:
        if self._task == "segmentation":
            is_inside = self._stretched(self._patterns[index % self.num_classes])[0] > 0
            return np.where(is_inside, np.int64(index % self.num_classes), np.int64(0))
        rng = generator(self.seed, f"{split} values", index)
        if self._task == "multi_label":
            return rng.integers(2, size=self.num_classes).astype(np.float32)
        if self._task == "regression":
            return rng.standard_normal(self.num_classes, dtype=np.float32)
        return index % self.num_classes

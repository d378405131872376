"""Synthetic samples: images of class patterns with noise, and tokens of a Markov chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import Box, Dataset, Image, Label, Split, Tokens, dataset, generator

_CELLS = 8
_NOISE_PX = 64
_SIGNAL = 0.6


@dataset("synthetic", tasks=TASKS, keys=("depth_px",))
class SyntheticDataset(Dataset):
    """Images or volumes with class patterns of 8 cells a side stretched over them, plus noise.

    A pattern looks the same after flips and quarter turns. An image is 0.6 x pattern + 0.8 x noise,
    so it has unit variance; classes alternate by index. The noise is one 64 px patch repeated from
    a random offset, which costs a copy instead of a draw for each pixel. A mask is the class at
    pixels where its pattern is positive, and 0 elsewhere. For several labels or values, an image is
    the sum of the patterns weighted by the labels.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        shape = (data.channels, *data.sides_px)
        super().__init__(
            shape, data.num_classes, data.train_samples, data.validation_samples, seed, data.augment
        )
        self._cells = [np.arange(side) * _CELLS // side for side in data.sides_px]
        self._whole = Box(*(slice(side) for side in data.sides_px))
        self._patterns = [self._pattern(number) for number in range(data.num_classes)]
        self._task = data.task or TASKS[0]

    def _pattern(self, number: int) -> Image:
        rng = generator(self.seed, "pattern", number)
        cells = rng.standard_normal((self.shape[0], *(_CELLS for _ in self._cells)))
        for axis in range(1, cells.ndim):
            cells = cells + np.flip(cells, axis)
        cells = cells + cells.swapaxes(-1, -2)
        return np.asarray(_SIGNAL * cells / cells.std(), dtype=np.float32)

    def _pixels(self, split: Split, index: int) -> Image:
        return self._part(split, index, self._whole)

    def reads_rows(self, split: Split) -> bool:
        """Return True, because any part can be generated alone."""
        return True

    def _write(self, split: Split, index: int, box: Box, out: Image) -> None:
        out[...] = self._part(split, index, box)

    def reads_mask_rows(self, split: Split) -> bool:
        """Return whether there are masks, any part of which can be generated alone."""
        return self._task == "segmentation"

    def _mask(self, split: Split, index: int, box: Box) -> Tokens:
        number = index % self.num_classes
        is_inside = self._stretched(self._patterns[number][:1], box)[0] > 0
        return np.where(is_inside, np.int64(number), np.int64(0))

    def _part(self, split: Split, index: int, box: Box) -> Image:
        channels, *sides = self.shape
        rng = generator(self.seed, split, index)
        patch = rng.standard_normal((channels, *(_NOISE_PX for _ in sides)), dtype=np.float32)
        patch *= np.float32((1 - _SIGNAL**2) ** 0.5)
        offsets = rng.integers(_NOISE_PX, size=len(sides))
        noise = _picked(
            patch,
            [
                (np.arange(side)[span] + offset) % _NOISE_PX
                for side, span, offset in zip(sides, box, offsets, strict=True)
            ],
        )
        label = None if self._task == "segmentation" else self._label(split, index)
        if isinstance(label, np.ndarray):
            pattern = np.tensordot(label, np.stack(self._patterns), 1).astype(np.float32)
        else:
            pattern = self._patterns[index % self.num_classes]
        noise += self._stretched(pattern, box)
        return noise

    def _stretched(self, pattern: Image, box: Box) -> Image:
        return _picked(pattern, [cells[span] for cells, span in zip(self._cells, box, strict=True)])

    def _label(self, split: Split, index: int) -> Label:
        if self._task == "segmentation":
            return self._mask(split, index, self._whole)
        rng = generator(self.seed, f"{split} values", index)
        if self._task == "multi_label":
            return rng.integers(2, size=self.num_classes).astype(np.float32)
        if self._task == "regression":
            return rng.standard_normal(self.num_classes, dtype=np.float32)
        return index % self.num_classes


def _picked(image: Image, places: Sequence[NDArray[np.int64]]) -> Image:
    """Return the values at the places along each axis after the channels, as a new array."""
    place: Any = (slice(None), *np.ix_(*places))
    return np.asarray(image[place])

"""Samples from nothing: images of class patterns under noise, and sequences of tokens from a Markov chain."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import (
    TOKEN_PAIRS,
    TOKENS,
    Box,
    Dataset,
    Image,
    Label,
    Split,
    Tokens,
    dataset,
    generator,
)

_CELLS = 8
_NOISE_PX = 64
_SIGNAL = 0.6
_WHOLE = Box(slice(None), slice(None))


@dataset("synthetic", tasks=TASKS)
class SyntheticDataset(Dataset):
    """Classes are random patterns of 8 x 8 cells stretched over the image, under noise.

    A pattern looks the same after flips and quarter turns. An image is 0.6 x pattern + 0.8 x noise,
    so unit variance; classes take turns by index. The noise is one 64 px patch repeated from a
    random offset, which costs a copy and not a draw for each pixel. A mask is the class where its
    pattern is positive, and elsewhere 0; of several labels or values, an image is the sum of the
    patterns by their labels.
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
        """Return True: any part can be made alone."""
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


CHANCES = (0.7, 0.2, 0.1)
START = 0


@dataset("tokens", kind=TOKENS)
class TokenDataset(Dataset):
    """Sequences of `data.length` tokens, int64 of shape (length,).

    The labels are the next tokens, (length,).
    A token has three successors, taken with the chances 0.7, 0.2 and 0.1. Each is given by a
    permutation of all `data.num_classes` tokens, which the seed draws, so that every token is as
    frequent as any other: the entropy is 0.80 nats a token, and always guessing one token is right
    for one in num_classes.
    """

    dtype: ClassVar[type[np.int64]] = np.int64

    def __init__(self, data: DataConfig, seed: int) -> None:
        super().__init__(
            (data.length,),
            data.num_classes,
            data.train_samples,
            data.validation_samples,
            seed,
            augment=False,
        )
        self._length = data.length
        self._next = [
            generator(seed, "successor", number).permutation(data.num_classes)
            for number in range(len(CHANCES))
        ]

    def _pixels(self, split: Split, index: int) -> Tokens:
        return self._sequence(split, index, self._length)

    def _label(self, split: Split, index: int) -> Tokens:
        return self._sequence(split, index, self._length + 1)[1:]

    def _sequence(self, split: Split, index: int, length: int) -> Tokens:
        rng = generator(self.seed, split, index)
        token = int(rng.integers(self.num_classes))
        # as many draws whatever the length, so that a sample and its labels are of one sequence
        choices = rng.choice(len(CHANCES), size=self._length, p=CHANCES).tolist()
        tokens = [token]
        for choice in choices[: length - 1]:
            token = int(self._next[choice][token])
            tokens.append(token)
        return np.array(tokens, dtype=np.int64)


@dataset("token_pairs", kind=TOKEN_PAIRS)
class TokenPairDataset(TokenDataset):
    """A sequence and its translation, int64 of shape (2, length).

    The labels are the translation, (length,).
    The translation replaces each token by that of a dictionary, a permutation which the seed draws.
    Row 0 is the source; row 1 the translation one place later, behind a start token: what a decoder
    reads in training.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        super().__init__(data, seed)
        self.shape = (2, data.length)
        self._dictionary = (
            generator(seed, "dictionary").permutation(data.num_classes).astype(np.int64)
        )

    def _pixels(self, split: Split, index: int) -> Tokens:
        source = super()._pixels(split, index)
        return np.stack([source, np.concatenate([[START], self._dictionary[source[:-1]]])])

    def _label(self, split: Split, index: int) -> Tokens:
        return self._dictionary[super()._pixels(split, index)]

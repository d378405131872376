"""Sequences of tokens from nothing: a Markov chain whose steps the seed draws, alone or with its translation."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gems.config.schema import DataConfig
from gems.data.dataset import TOKEN_PAIRS, TOKENS, Dataset, Split, Tokens, dataset
from gems.data.rng import generator

CHANCES = (0.7, 0.2, 0.1)
START = 0


@dataset("tokens", kind=TOKENS)
class TokenDataset(Dataset):
    """Sequences of `data.length` tokens, int64 of shape (length,); the labels are the next tokens, (length,).

    A token has three successors, taken with the chances 0.7, 0.2 and 0.1. Each is given by a permutation of all
    `data.num_classes` tokens, which the seed draws, so that every token is as frequent as any other: the entropy is
    0.80 nats a token, and always guessing one token is right for one in num_classes.
    """

    dtype: ClassVar[type[np.int64]] = np.int64
    kind: ClassVar[str] = TOKENS

    def __init__(self, data: DataConfig, seed: int) -> None:
        shape = shape_of(self.kind, data.length)
        super().__init__(shape, data.num_classes, data.train_samples, data.validation_samples, seed, augment=False)
        self._length = data.length
        self._next = [
            generator(seed, "successor", number).permutation(data.num_classes) for number in range(len(CHANCES))
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
    """A sequence and its translation, int64 of shape (2, length); the labels are the translation, (length,).

    The translation replaces each token by that of a dictionary, a permutation which the seed draws. Row 0 is the
    source; row 1 the translation one place later, behind a start token: what a decoder reads in training.
    """

    kind: ClassVar[str] = TOKEN_PAIRS

    def __init__(self, data: DataConfig, seed: int) -> None:
        super().__init__(data, seed)
        self._dictionary = generator(seed, "dictionary").permutation(data.num_classes).astype(np.int64)

    def _pixels(self, split: Split, index: int) -> Tokens:
        source = super()._pixels(split, index)
        return np.stack([source, np.concatenate([[START], self._dictionary[source[:-1]]])])

    def _label(self, split: Split, index: int) -> Tokens:
        return self._dictionary[super()._pixels(split, index)]


def shape_of(kind: str, length: int) -> tuple[int, ...]:
    """Return the shape of a sample of `length` tokens: one row, or the two of a pair."""
    return (2, length) if kind == TOKEN_PAIRS else (length,)

"""GNMT and BIG LSTM, the language models of Pal et al., with data that they can learn: a plugin.

`gems verify plugins=[scripts.reproduce.language] model=gnmt data=token_pairs ...` trains one, and
`python -m scripts.reproduce.language` prints the parameters of the published sizes.

GNMT (Wu et al. 2016, arXiv 1609.08144) has `model.depth` LSTM layers in the encoder, the first in
both directions, and as many in the decoder, with residuals from the third layer on in either. The
lowest decoder layer asks an additive attention over the encoder's output for a context, from the
place before (section 3.1, y_{i-1}), and all layers above read that context too. Dropout and the
residuals' clipping for inference are left out. It takes pairs of sequences, int64 (N, 2, T):
source, and the translation that the decoder is to have said so far.

BIG LSTM (Jozefowicz et al. 2016, arXiv 1602.02410, section 3) has word embeddings, `model.depth`
LSTM layers whose outputs are projected (Sak et al. 2014, arXiv 1402.1128) from 8 times
`model.width` cells to `model.width`, and a softmax over the whole vocabulary; nothing is sampled or
dropped. It takes sequences, int64 (N, T).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from gems.config.schema import DataConfig, ModelConfig
from gems.data import Dataset, Split, dataset
from gems.data.dataset import TOKEN_PAIRS, TOKENS, Tokens, generator
from gems.errors import ConfigError
from gems.models import MODELS, Layer, ModelFamily, layers_of
from gems.utils.tables import table

CELLS_PER_OUTPUT = 8
FIRST_RESIDUAL = 3
PUBLISHED = {
    "GNMT": ModelConfig(name="gnmt", depth=8, width=1024, vocabulary=32_000),
    "BIG LSTM": ModelConfig(name="biglstm", depth=2, width=1024, vocabulary=793_470),
}


def block(name: str, kind: str, target: str, **options: Any) -> Layer:
    """Return a layer of `scripts.reproduce.sequences`."""
    return Layer(name, kind, f"scripts.reproduce.sequences:{target}", tuple(options.items()))


def check(model: ModelConfig, data: DataConfig, least_depth: int) -> None:
    """Refuse sizes without a network."""
    if model.depth < least_depth:
        raise ConfigError("model.depth", model.depth, f"LSTM layers, at least {least_depth}")
    if model.width < 1:
        raise ConfigError("model.width", model.width, "the size of the hidden states, at least 1")
    if model.vocabulary < data.num_classes:
        text = f"must be data.num_classes={data.num_classes} or more: the data has so many tokens"
        raise ConfigError("model.vocabulary", model.vocabulary, text)


def gnmt_layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return source, encoder1, ..., target, decoder1, attention, decoder2, ..., head."""
    check(model, data, 2)
    width = model.width
    words = {"vocabulary": model.vocabulary, "width": width}
    out = [block("source", "embedding", "SourceEmbedding", **words)]
    for number in range(1, model.depth + 1):
        out.append(
            block(
                f"encoder{number}",
                "lstm",
                "Recurrent",
                in_features=2 * width if number == 2 else width,
                width=width,
                is_residual=number >= FIRST_RESIDUAL,
                carried=("target",),
                bidirectional=number == 1,
            )
        )
    lowest = {"in_features": width, "width": width, "carried": ("memory",)}
    out.append(block("target", "embedding", "TargetEmbedding", **words))
    out.append(block("decoder1", "lstm", "Recurrent", **lowest))
    out.append(block("attention", "attention", "Attention", width=width))
    for number in range(2, model.depth + 1):
        options = {"is_residual": number >= FIRST_RESIDUAL, "is_last": number == model.depth}
        out.append(block(f"decoder{number}", "lstm", "ContextDecoder", width=width, **options))
    return (*out, block("head", "head", "WordHead", **words))


def biglstm_layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return words, lstm1, lstm2, ..., head."""
    check(model, data, 1)
    width = model.width
    words = {"vocabulary": model.vocabulary, "width": width}
    recurrent = {"in_features": width, "width": width, "num_cells": CELLS_PER_OUTPUT * width}
    return (
        block("words", "embedding", "WordEmbedding", **words),
        *(
            block(f"lstm{number + 1}", "lstm", "Recurrent", **recurrent)
            for number in range(model.depth)
        ),
        block("head", "head", "WordHead", **words),
    )


MODELS.register("gnmt", ModelFamily(gnmt_layers, takes=TOKEN_PAIRS))
MODELS.register("biglstm", ModelFamily(biglstm_layers, takes=TOKENS))


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


def main() -> None:
    """Print the parameters of the published sizes."""
    from gems.models.build import build_layers

    rows = []
    for name, model in PUBLISHED.items():
        layers = layers_of(model, DataConfig(name=MODELS[model.name].takes))
        modules = build_layers(layers, 0, len(layers), 0, device="meta")
        count = sum(parameter.numel() for module in modules for parameter in module.parameters())
        rows.append((name, len(layers), count))
    print(table({"network": "", "layers": "d", "parameters": ",d"}, rows))


if __name__ == "__main__":
    main()

"""Synthetic tokens: labels that are the next tokens, a pattern that can be learnt, and its translation."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from gems.config.schema import DataConfig
from gems.data import check_data, kind_of, open_dataset, sample_shape, sources_of
from gems.errors import ConfigError
from scripts.reproduce.language import CHANCES, START

TOKENS = DataConfig(
    name="tokens", num_classes=50, length=12, train_samples=40, validation_samples=7
)
PAIRS = DataConfig(
    name="token_pairs", num_classes=50, length=12, train_samples=40, validation_samples=7
)


def test_what_a_source_gives() -> None:
    assert (kind_of(TOKENS), sample_shape(TOKENS)) == ("tokens", (12,))
    assert (kind_of(PAIRS), sample_shape(PAIRS)) == ("token_pairs", (2, 12))
    images = DataConfig(channels=2, height_px=3, width_px=5)
    assert (kind_of(images), sample_shape(images)) == ("images", (2, 3, 5))
    assert (sources_of("tokens"), sources_of("token_pairs")) == (["tokens"], ["token_pairs"])
    assert {"synthetic", "tissue", "folder"} <= set(sources_of("images"))


@pytest.mark.parametrize("data", [TOKENS, PAIRS], ids=["tokens", "token_pairs"])
@pytest.mark.parametrize("length", [1, 2, 12])
def test_samples_and_labels_are_int64_and_in_the_vocabulary(data: DataConfig, length: int) -> None:
    data = DataConfig(name=data.name, num_classes=50, length=length)
    dataset = open_dataset(data, 0)
    for split in ("train", "validation"):
        sample = dataset.image(split, 3, 1)
        labels = np.asarray(dataset.label(split, 3))
        assert sample.shape == dataset.shape == sample_shape(data) and sample.dtype == np.int64
        assert labels.shape == (length,) and labels.dtype == np.int64
        for values in (sample, labels):
            assert values.min() >= 0 and values.max() < 50
        assert sample.flags.c_contiguous


def test_labels_are_the_next_tokens() -> None:
    dataset = open_dataset(TOKENS, 0)
    for index in range(20):
        tokens = dataset.image("train", index)
        labels = np.asarray(dataset.label("train", index))
        assert np.array_equal(tokens[1:], labels[:-1])


def test_a_sequence_depends_on_seed_split_and_index_alone() -> None:
    first, again, other = (open_dataset(TOKENS, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.image("train", 9, 1), again.image("train", 9, 2))
    different = [
        first.image("train", 9),
        first.image("train", 8),
        first.image("validation", 6),
        other.image("train", 9),
    ]
    assert len({sequence.tobytes() for sequence in different}) == 4


def test_the_next_token_is_as_likely_as_it_says() -> None:
    dataset = open_dataset(
        DataConfig(name="tokens", num_classes=10, length=400, train_samples=60), 0
    )
    pairs: Counter[tuple[int, int]] = Counter()
    for index in range(60):
        tokens = dataset.image("train", index).tolist()
        labels = np.asarray(dataset.label("train", index)).tolist()
        pairs.update(zip(tokens, labels, strict=True))
    after = {
        token: Counter({b: n for (a, b), n in pairs.items() if a == token}) for token in range(10)
    }
    assert all(1 <= len(successors) <= len(CHANCES) for successors in after.values())
    known = np.mean(
        [max(successors.values()) / successors.total() for successors in after.values()]
    )
    assert known >= CHANCES[0] - 0.02
    entropy = (
        -sum(n * math.log(n / after[a].total()) for (a, _), n in pairs.items()) / pairs.total()
    )
    assert entropy <= 0.82
    shares = np.array([successors.total() for successors in after.values()]) / pairs.total()
    assert shares.min() > 0.08 and shares.max() < 0.12


def test_the_translation_is_a_dictionary_of_the_source() -> None:
    dataset = open_dataset(PAIRS, 0)
    dictionary: dict[int, int] = {}
    for index in range(40):
        (source, given), labels = (
            dataset.image("train", index),
            np.asarray(dataset.label("train", index)),
        )
        assert given[0] == START and np.array_equal(given[1:], labels[:-1])
        for word, meaning in zip(source.tolist(), labels.tolist(), strict=True):
            assert dictionary.setdefault(word, meaning) == meaning
    assert len(set(dictionary.values())) == len(dictionary) > 40


@pytest.mark.parametrize("data", [TOKENS, PAIRS], ids=["tokens", "token_pairs"])
def test_every_label_is_counted(data: DataConfig) -> None:
    counts = open_dataset(data, 0).class_counts("validation")
    assert len(counts) == 50 and sum(counts) == 7 * 12


def test_a_large_vocabulary_is_quick_to_open() -> None:
    dataset = open_dataset(DataConfig(name="tokens", num_classes=200_000, length=3), 0)
    assert dataset.image("train", 0).max() > 0


def test_no_token_and_an_index_outside_the_split_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(DataConfig(name="tokens", length=0))
    assert caught.value.key == "data.length"
    with pytest.raises(IndexError, match="of 7 in validation"):
        open_dataset(TOKENS, 0).image("validation", 7)

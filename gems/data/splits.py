"""Choose the samples for validation: by a file, or by the seed."""

from __future__ import annotations

import csv
import json

import numpy as np
from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.data.dataset import Split, generator
from gems.data.files.paths import expanded
from gems.errors import ConfigError

NAMES: dict[str, Split | None] = {
    "train": "train",
    "validation": "validation",
    "val": "validation",
    "valid": "validation",
    "test": None,
}
_FORMS = "CSV with columns index,split, or JSON with the lists train and validation"

Indices = dict[Split, NDArray[np.int64]]


def split_indices(data: DataConfig, count: int, seed: int) -> Indices:
    """Return the indices of both splits among `count` samples.

    They come from data.split_path, or else are drawn from the seed.

    Raises:
        ConfigError: As in `read_split`, or there are too few samples for two splits.
    """
    if data.split_path is not None:
        return read_split(data.split_path, count)
    num_validation = num_held_out(data, count)
    if num_validation == 0 or count < 2:
        raise ConfigError(
            "data.validation_samples",
            data.validation_samples,
            f"leaves none of {count} for validation",
        )
    order = generator(seed, "split").permutation(count)
    return {"train": np.sort(order[num_validation:]), "validation": np.sort(order[:num_validation])}


def num_held_out(data: DataConfig, count: int) -> int:
    """Return how many of `count` samples are for validation.

    Their share is data.validation_samples divided by the sum of both counts of `data`.
    """
    share = data.validation_samples / (data.train_samples + data.validation_samples)
    return min(max(round(share * count), 1), count - 1) if count > 1 and share else 0


def read_split(path: str, count: int) -> Indices:
    """Read the indices of both splits from a file.

    Indices that the file omits, or assigns to test, are left out.

    Raises:
        ConfigError: The file cannot be read or has another form, an index occurs twice or is beyond
            `count`, or a split is empty.
    """
    splits: dict[Split, list[int]] = {"train": [], "validation": []}
    for name, index in _rows(path):
        if name not in NAMES:
            raise ConfigError(
                "data.split_path", path, f"names a split {name!r}", f"use {', '.join(NAMES)}"
            )
        if not 0 <= index < count:
            raise ConfigError(
                "data.split_path",
                path,
                f"names sample {index}, and there are {count}",
                "count from 0",
            )
        split = NAMES[name]
        if split is not None:
            splits[split].append(index)
    for split, indices in splits.items():
        if not indices:
            raise ConfigError(
                "data.split_path", path, f"has no sample for {split}", f"expected {_FORMS}"
            )
    every = [index for indices in splits.values() for index in indices]
    if len(every) != len(set(every)):
        twice = next(index for index in every if every.count(index) > 1)
        raise ConfigError(
            "data.split_path", path, f"names sample {twice} twice", "each sample is in one split"
        )
    return {split: np.array(indices, dtype=np.int64) for split, indices in splits.items()}


def _rows(path: str) -> list[tuple[str, int]]:
    """Return the (name of the split, index) of each entry."""
    try:
        text = expanded("data.split_path", path).read_text()
        if path.endswith(".json"):
            return [
                (str(name), int(index))
                for name, indices in json.loads(text).items()
                for index in indices
            ]
        return [
            (row["split"].strip(), int(row["index"])) for row in csv.DictReader(text.splitlines())
        ]
    except OSError as error:
        raise ConfigError(
            "data.split_path", path, f"cannot be read ({error.strerror})", f"expected {_FORMS}"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            "data.split_path", path, f"is of another form ({error})", f"expected {_FORMS}"
        ) from error

"""Sources of images and tokens by name (no torch here: arrays are numpy's)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache

from gems.config.fields import check_fields
from gems.config.schema import DataConfig
from gems.data.dataset import (
    DATASETS,
    IMAGES,
    TOKEN_PAIRS,
    Dataset,
    Image,
    Source,
    Split,
    Tokens,
    dataset,
)
from gems.data.target import SOURCE as TARGET
from gems.data.target import describe, resolve_target
from gems.errors import ConfigError, nearest, one_of

__all__ = [
    "DATASETS",
    "IMAGES",
    "Dataset",
    "Image",
    "Source",
    "Split",
    "Tokens",
    "check_data",
    "class_names",
    "dataset",
    "find_source",
    "kind_of",
    "num_train",
    "open_dataset",
    "reads_bytes",
    "reads_mask_rows",
    "reads_rows",
    "resolve_data",
    "sample_shape",
    "sources_of",
    "task_of",
]


def check_data(data: DataConfig) -> None:
    """Raise ConfigError for data that cannot be opened, without decoding an image."""
    _check_keys(data)
    find_source(data).check(data)


def resolve_data(data: DataConfig) -> DataConfig:
    """Return a copy of `data` with the derived fields that are None filled in by the source."""
    if data.target is not None:
        return resolve_target(data)
    return replace(data, field_of_view_px=find_source(data).field_of_view_px(data))


def open_dataset(data: DataConfig, seed: int) -> Dataset:
    """Open the configured data set.

    The same (data, seed) gives the same images and labels on every rank.

    Raises:
        ConfigError: As in `check_data`, or an image file cannot be read; the error names the file.
    """
    if data.target is None:
        check_data(data)
    else:
        # the source's check would construct the user's dataset a second time
        _check_keys(data)
    return find_source(data).open(data, seed)


def reads_rows(data: DataConfig) -> bool:
    """Return whether training images can be read in parts; False if they are not here."""
    return data.target is None and _answer("reads_rows", json.dumps(asdict(data)))


def reads_mask_rows(data: DataConfig) -> bool:
    """Return whether training masks can be read in parts; False if they are not here."""
    return data.target is None and _answer("reads_mask_rows", json.dumps(asdict(data)))


def reads_bytes(data: DataConfig) -> bool:
    """Return whether training images are stored as bytes; False if they are not here."""
    return data.target is None and _answer("reads_bytes", json.dumps(asdict(data)))


@lru_cache(maxsize=16)
def _answer(question: str, document: str) -> bool:
    """Ask the dataset; each question may open every file."""
    with contextlib.suppress(ConfigError, OSError):
        dataset = open_dataset(DataConfig(**json.loads(document)), 0)
        return bool(getattr(dataset, question)("train"))
    return False


def class_names(data: DataConfig) -> list[str]:
    """Return the names of the classes in the source or in data.class_map, or else their numbers."""
    numbers: Mapping[str, int] = data.class_map if task_of(data) == "classification" else {}
    with contextlib.suppress(ConfigError, OSError):  # the data may no longer exist
        numbers = find_source(data).class_numbers(data) or numbers
    names = {number: name for name, number in numbers.items()}
    return [names.get(number, str(number)) for number in range(data.num_classes)]


def num_train(data: DataConfig, seed: int) -> int:
    """Return the number of training samples; some sources count them themselves.

    Raises:
        ConfigError: As in `open_dataset`.
    """
    if not find_source(data).counts_itself:
        return data.train_samples
    return (
        int(describe(data)["num_train"])
        if data.target is not None
        else open_dataset(data, seed).num_train
    )


def find_source(data: DataConfig) -> Source:
    """Return the source of the samples: a registered one, or the source of a user's own dataset.

    Raises:
        ConfigError: No source has this name.
    """
    if data.target is None and data.name not in DATASETS:
        near = nearest(data.name, DATASETS, 1)[0]
        raise ConfigError("data.name", data.name, one_of(sorted(DATASETS)), f"did you mean {near}?")
    return TARGET if data.target is not None else DATASETS[data.name]


def kind_of(data: DataConfig) -> str:
    """Return the kind of a sample: images, tokens or token_pairs."""
    return find_source(data).kind


def task_of(data: DataConfig) -> str:
    """Return the task: classification, multi_label, segmentation or regression.

    Raises:
        ConfigError: The source has no labels for data.task.
    """
    tasks = find_source(data).tasks
    if data.task is not None and data.task not in tasks:
        raise ConfigError("data.task", data.task, one_of(tasks), f"data={data.name} gives no other")
    return data.task or tasks[0]


def sources_of(kind: str) -> list[str]:
    """Return the sorted names of the sources with samples of a kind."""
    return sorted(name for name, source in DATASETS.items() if source.kind == kind)


def sample_shape(data: DataConfig) -> tuple[int, ...]:
    """Return the shape of one sample.

    It is (channels, height, width) for an image, with the depth before the height for a volume, and
    (length,) or (2, length) for tokens.
    """
    if kind_of(data) == IMAGES:
        return data.channels, *data.sides_px
    return (2, data.length) if kind_of(data) == TOKEN_PAIRS else (data.length,)


def _check_keys(data: DataConfig) -> None:
    check_fields(data, "data.")
    if task_of(data) in ("classification", "segmentation") and data.num_classes < 2:
        raise ConfigError("data.num_classes", data.num_classes, "must be 2 or more for classes")
    usual = DataConfig()
    source = find_source(data)
    readers = {
        "data.target=package.module.Class": TARGET,
        **{f"data={name}": each for name, each in DATASETS.items()},
    }
    for key in sorted({key for each in readers.values() for key in each.keys} - set(source.keys)):
        if getattr(data, key) != getattr(usual, key):
            names = [name for name, each in readers.items() if key in each.keys]
            text = f"is not read by {data.target or f'data={data.name}'}"
            raise ConfigError(
                f"data.{key}",
                getattr(data, key),
                text,
                f"leave it out, or use {' or '.join(names)}",
            )

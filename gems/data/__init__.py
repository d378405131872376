"""Sources of images and tokens by name (no torch here: arrays are numpy's)."""

from __future__ import annotations

from dataclasses import replace

from gems.config.fields import check_fields
from gems.config.resolve import global_batch
from gems.config.schema import DataConfig, RunSpec
from gems.data.dataset import DATASETS, IMAGES, TOKEN_PAIRS, Dataset, Image, Source, Split, Tokens, dataset
from gems.errors import ConfigError, one_of

__all__ = [
    "DATASETS",
    "IMAGES",
    "Dataset",
    "Image",
    "Source",
    "Split",
    "Tokens",
    "check_data",
    "dataset",
    "kind_of",
    "labels_per_sample",
    "labels_per_step",
    "open_dataset",
    "resolve_data",
    "sample_shape",
    "sources_of",
    "task_of",
]


def check_data(data: DataConfig) -> None:
    """Raise ConfigError for data that cannot be opened, as far as can be told without decoding an image."""
    check_fields(data, "data.")
    task_of(data)
    DATASETS[data.name].check(data)


def resolve_data(data: DataConfig) -> DataConfig:
    """Return a copy of `data` with the fields that None leaves to the source filled in."""
    return replace(data, field_of_view_px=DATASETS[data.name].field_of_view_px(data))


def open_dataset(data: DataConfig, seed: int) -> Dataset:
    """Open the configured data set; the same (data, seed) gives the same images and labels on every rank.

    Raises ConfigError as `check_data`, and for a bad image file, which it names.
    """
    check_data(data)
    return DATASETS[data.name].open(data, seed)


def kind_of(data: DataConfig) -> str:
    """Return what a sample is: images, tokens or token_pairs."""
    return DATASETS[data.name].kind


def task_of(data: DataConfig) -> str:
    """Return what the labels are: classification, multi_label, segmentation or regression.

    Raises:
        ConfigError: data.task is none that the source can give.
    """
    tasks = DATASETS[data.name].tasks
    if data.task is not None and data.task not in tasks:
        raise ConfigError("data.task", data.task, one_of(tasks), f"data={data.name} gives no other")
    return data.task or tasks[0]


def sources_of(kind: str) -> list[str]:
    """Return the names of the sources whose samples are of a kind."""
    return sorted(name for name, source in DATASETS.items() if source.kind == kind)


def sample_shape(data: DataConfig) -> tuple[int, ...]:
    """Return the shape of one sample: (channels, height, width) of an image, (length,) or (2, length) of tokens."""
    if kind_of(data) == IMAGES:
        return data.channels, data.height_px, data.width_px
    return (2, data.length) if kind_of(data) == TOKEN_PAIRS else (data.length,)


def labels_per_sample(data: DataConfig) -> int:
    """Return how many labels a sample has: one for an image, one for each place of a sequence of tokens."""
    return 1 if kind_of(data) == IMAGES else data.length


def labels_per_step(spec: RunSpec) -> int:
    """Return the labels of one optimizer step of a resolved run: as many as images, or as tokens of its sequences."""
    return global_batch(spec) * labels_per_sample(spec.data)

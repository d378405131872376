"""A user's own map-style dataset, named by data.target.

It returns (sample, label) by index, like `torch.utils.data.Dataset`. A process without torch asks a
child process about it, which constructs it and reads its first samples.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import Dataset, Image, Label, Source, Split, Tokens, as_label, seeded
from gems.data.splits import split_indices
from gems.errors import ConfigError
from gems.utils.cache import cached
from gems.utils.targets import (
    answer,
    ask_child,
    call_target,
    load_target,
    locate,
    source_of,
    target_error,
)
from gems.utils.units import SIDES

KEY = "data.target"
SPLITS: tuple[Split, Split] = ("train", "validation")
# keyword arguments that make a dataset return one split
ARGUMENTS: dict[str, dict[Split, object]] = {
    "split": {"train": "train", "validation": "validation"},
    "train": {"train": True, "validation": False},
}


class TargetDataset(Dataset):
    """The samples of a user's dataset, checked and seeded.

    Around each read, the generators of Python, numpy and torch are seeded by (seed, split, index,
    draw). So the rank that reads images and the rank that reads labels get the same sample, and so
    does a resumed run.
    """

    seeds_process = True

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._config, self._target = data, str(data.target)
        self._task = data.task or TASKS[0]
        self._splits = _open_splits(data, seed)
        counts = [
            len(_measured(self._target, dataset)) if indices is None else len(indices)
            for dataset, indices in self._splits.values()
        ]
        shape = (data.channels, *data.sides_px)
        super().__init__(shape, data.num_classes, counts[0], counts[1], seed, augment=False)
        train = self._splits["train"][0]
        num_classes = getattr(train, "num_classes", None)
        if isinstance(num_classes, int) and num_classes != data.num_classes:
            text = f"{self._target} has num_classes={num_classes}"
            raise ConfigError(
                "data.num_classes", data.num_classes, text, f"set data.num_classes={num_classes}"
            )
        for split, count in zip(SPLITS, counts, strict=True):
            if not count:
                raise ConfigError(
                    KEY,
                    self._target,
                    f"has no sample for {split}",
                    "set data.kwargs, or another split",
                )
        self._collate: Callable[[list[Any]], Any] | None = getattr(train, "collate", None)

    def image(self, split: Split, index: int, draw: int = 0) -> Image | Tokens:
        """Return one sample of the dataset as float32 of shape (channels, *sides)."""
        return self._as_image(self._read(split, index, draw)[0], split, index)

    def label(self, split: Split, index: int, draw: int = 0) -> Label:
        """Return the label of one sample.

        It comes from `label(index)` or `targets` of the dataset, or else from reading the sample. A
        mask is always read with its sample, because the dataset may crop both.
        """
        self._check(split, index)
        dataset, place = self._place(split, index)
        quick = None if self._task == "segmentation" else _labels_of(dataset)
        return self._as_label(
            self._read(split, index, draw)[1] if quick is None else quick(place), split, index
        )

    def sample(self, split: Split, index: int, draw: int = 0) -> tuple[Image | Tokens, Label]:
        """Return a sample and its label by one read."""
        image, label = self._read(split, index, draw)
        return self._as_image(image, split, index), self._as_label(label, split, index)

    def batch(
        self, split: Split, samples: NDArray[np.int64], images: bool = True, labels: bool = True
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Return a micro-batch, using the dataset's own `collate` if it has one.

        `collate` gets whole samples on every rank.
        """
        if self._collate is None:
            return super().batch(split, samples, images, labels)
        pairs = [tuple(self._read(split, index, draw)) for index, draw in samples.tolist()]
        try:
            with seeded(self.seed, f"collate {split}", *samples.ravel().tolist()):
                batch = self._collate(pairs)
            first, second = (
                np.asarray(part.detach() if hasattr(part, "detach") else part) for part in batch
            )
        except Exception as error:
            raise target_error(KEY, self._target, "has a collate that fails", error) from error
        expected = (len(samples), *self.shape)
        if first.shape != expected or len(second) != len(samples):
            text = (
                f"its collate gives samples of shape {first.shape} and labels of shape"
                f" {second.shape}"
            )
            raise ConfigError(
                KEY, self._target, text, f"must be {expected} and ({len(samples)}, ...)"
            )
        is_class = np.issubdtype(second.dtype, np.integer)
        return (
            (
                self._finite(first.astype(np.float32, copy=False), f"a micro-batch of {split}")
                if images
                else None
            ),
            second.astype(np.int64 if is_class else np.float32, copy=False) if labels else None,
        )

    def class_counts(self, split: Split) -> tuple[int, ...]:
        """Return the number of labels of each class, from the dataset or by counting its labels."""
        dataset, indices = self._splits[split]
        told = getattr(dataset, "class_counts", None)
        if callable(told):
            told = told(split)
        elif indices is not None:  # a sequence counts the samples of both splits
            told = None
        if told is None:
            return super().class_counts(split)
        counts = tuple(int(count) for count in told)
        if len(counts) != self.num_classes:
            text = f"its class_counts of {split} has {len(counts)} entries"
            raise ConfigError(KEY, self._target, text, f"data.num_classes is {self.num_classes}")
        return counts

    def name_of(self, split: Split, index: int) -> str:
        """Return the name of a sample: its number in the user's dataset."""
        return f"sample {self._place(split, index)[1]} ({split})"

    def _pixels(self, split: Split, index: int) -> Image:
        return cast(Image, self.image(split, index))

    def _label(self, split: Split, index: int) -> Label:
        return self.label(split, index)

    def _place(self, split: Split, index: int) -> tuple[Any, int]:
        """Return the user's dataset of a split, and the index in it."""
        dataset, indices = self._splits[split]
        return dataset, index if indices is None else int(indices[index])

    def _read(self, split: Split, index: int, draw: int) -> Sequence[Any]:
        self._check(split, index)
        dataset, place = self._place(split, index)
        try:
            with seeded(self.seed, f"sample {split}", index, draw) as number:
                _seed_members(dataset, number)
                sample = dataset[place]
        except ConfigError:
            raise
        except Exception as error:
            raise target_error(
                KEY, self._target, f"{self.name_of(split, index)} cannot be read", error
            ) from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            text = f"{self.name_of(split, index)} is of type {type(sample).__name__}"
            raise ConfigError(KEY, self._target, text, "must be a pair (sample, label)")
        return sample

    def _as_image(self, value: Any, split: Split, index: int) -> Image:
        is_tensor = hasattr(value, "detach")
        image = value.detach().float().numpy() if is_tensor else np.asarray(value)
        if image.shape == self.shape:
            return self._finite(
                np.ascontiguousarray(image, dtype=np.float32), self.name_of(split, index)
            )
        text = (
            f"{self.name_of(split, index)} has shape {image.shape}, and the keys say {self.shape}"
        )
        if image.ndim not in (3, 4):
            shapes = "(channels, height, width), or of a volume (channels, depth, height, width)"
            raise ConfigError(KEY, self._target, text, f"must be an array or tensor {shapes}")
        channels, *sides = image.shape
        if not is_tensor and sides[-1] <= 4 < channels:
            raise ConfigError(
                KEY, self._target, text, "give channels first, as a tensor or by transpose(2, 0, 1)"
            )
        named = zip(SIDES[-len(sides) :], sides, strict=True)
        advice = " ".join(
            [f"set data.channels={channels}", *(f"data.{name}={side}" for name, side in named)]
        )
        raise ConfigError(KEY, self._target, text, advice)

    def _finite(self, image: Image, name: str) -> Image:
        if math.isfinite(float(np.sum(image, dtype=np.float64))):
            return image
        wrong = ~np.isfinite(image)
        first = np.unravel_index(int(wrong.argmax()), wrong.shape)
        text = (
            f"{name} has {wrong.sum()} values that are not finite, the first ({image[first]}) in"
            f" row {first[-2]}, "
        )
        raise ConfigError(
            KEY, self._target, f"{text}column {first[-1]}", "repair the sample, or leave it out"
        )

    def _as_label(self, value: Any, split: Split, index: int) -> Label:
        return as_label(value, self._config, self._task, self.name_of(split, index))


def resolve_target(data: DataConfig) -> DataConfig:
    """Return the configuration of a user's dataset with its name and path resolved.

    `name` becomes the name of the class, `path` the folder of its package.

    Raises:
        ConfigError: The target is not a dotted name, or the path is not a folder.
    """
    name, path = locate(KEY, str(data.target), data.path)
    return replace(data, name=name, path=path)


def check(data: DataConfig) -> None:
    """Raise ConfigError if a dataset cannot be constructed, or its samples contradict `data`.

    Only the first samples are read.
    """
    describe(data)


def describe(data: DataConfig) -> dict[str, Any]:
    """Return the numbers of samples, num_train and num_validation.

    This process reads the dataset if torch is loaded. Otherwise a child process does, and its
    answer is cached until the code or the data change.

    Raises:
        ConfigError: As in `check`.
    """
    data = resolve_target(data)
    known = {
        name: value
        for name, value in asdict(data).items()
        if name not in ("prefetch_steps", "num_workers")
    }
    try:
        text = json.dumps(known, sort_keys=True)
    except TypeError as error:
        raise ConfigError("data.kwargs", data.kwargs, f"must be plain values ({error})") from error
    return _described(
        text,
        source_of(str(data.target), data.path),
        tuple(_stamps([data.kwargs, data.validation_kwargs])),
    )


@lru_cache(maxsize=64)
def _described(text: str, source: str | None, stamps: tuple[str, ...]) -> dict[str, Any]:
    target = json.loads(text)["target"]
    if "torch" in sys.modules:
        return _describe(text)
    if source is None:
        return dict(ask_child(KEY, target, __name__, text))
    return dict(
        cached(
            None,
            "data",
            repr((text, source, stamps)),
            lambda: ask_child(KEY, target, __name__, text),
        )
    )


def _describe(text: str) -> dict[str, Any]:
    """Construct the dataset, read its first sample of each split, and return the sample counts.

    Raises:
        ConfigError: The dataset cannot be constructed or read, or a sample differs when it is read
            again.
    """
    dataset = TargetDataset(DataConfig(**json.loads(text)), 0)
    for split in SPLITS:
        image, label = dataset.sample(split, 0)
        if dataset._collate is None and not np.array_equal(
            np.asarray(dataset.label(split, 0)), np.asarray(label)
        ):
            why = (
                f"label(index) or targets and {dataset.name_of(split, 0)} itself give different"
                " labels"
            )
            raise ConfigError(
                KEY, dataset._target, why, "let label(index) return what the sample has"
            )
        again, _ = dataset.sample(split, 0)
        if not np.array_equal(image, again):
            why = (
                f"{dataset.name_of(split, 0)} differs when it is read again under the same random"
                " numbers"
            )
            advice = (
                "draw from random, numpy.random or torch; a generator of its own would differ from"
                " rank to rank"
            )
            raise ConfigError(KEY, dataset._target, why, advice)
        dataset.batch(split, np.zeros((1, 2), dtype=np.int64))
    return {"num_train": dataset.num_train, "num_validation": dataset.num_validation}


def _open_splits(data: DataConfig, seed: int) -> dict[Split, tuple[Any, NDArray[np.int64] | None]]:
    """Return the user's dataset of each split, and the indices of its samples (None for all)."""
    target = str(data.target)
    path = data.path
    argument = {split: _argument(target, path, split) for split in SPLITS}
    if data.split_path is None and (data.validation_target or data.validation_kwargs):
        other = data.validation_target or target
        kwargs = data.validation_kwargs or data.kwargs
        if data.validation_target is None:
            kwargs = argument["validation"] | data.kwargs | data.validation_kwargs
        train = call_target(KEY, target, argument["train"] | data.kwargs, path)
        return {
            "train": (train, None),
            "validation": (call_target("data.validation_target", other, kwargs, path), None),
        }
    if (
        data.split_path is None
        and argument["train"]
        and not argument["train"].keys() & data.kwargs.keys()
    ):
        return {
            split: (call_target(KEY, target, data.kwargs | argument[split], path), None)
            for split in SPLITS
        }
    whole = call_target(KEY, target, data.kwargs, path)
    indices = split_indices(data, len(_measured(target, whole)), seed)
    return {split: (whole, indices[split]) for split in SPLITS}


def _argument(target: str, path: str | None, split: Split) -> dict[str, Any]:
    """Return the keyword argument, `split` or `train`, that makes a dataset return one split.

    Return an empty dict if it accepts neither.
    """
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(load_target(KEY, target, path)).parameters
        return next(
            ({name: values[split]} for name, values in ARGUMENTS.items() if name in parameters), {}
        )
    return {}


def _measured(target: str, dataset: Any) -> Any:
    """Return a dataset after checking that it has a length and samples by index.

    Raises:
        ConfigError: It lacks one of them.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        text = f"is a {type(dataset).__name__} without __len__ and __getitem__"
        raise ConfigError(
            KEY, target, text, "must be a map-style dataset: samples by index, and their number"
        )
    return dataset


def _labels_of(dataset: Any) -> Callable[[int], Any] | None:
    """Return a function from an index to its label that does not read the sample.

    Return None if the dataset has none.
    """
    quick = getattr(dataset, "label", None)
    if callable(quick):
        return cast("Callable[[int], Any]", quick)
    targets = getattr(dataset, "targets", None)
    # `transforms` changes image and label together, unless it is torchvision's pair of transforms
    joint = getattr(dataset, "transforms", None)
    changes_label = getattr(dataset, "target_transform", None) or (
        joint and not hasattr(joint, "target_transform")
    )
    if targets is None or changes_label:
        return None
    return cast("Callable[[int], Any]", targets.__getitem__)


def _seed_members(dataset: Any, number: int) -> None:
    """Seed members of a dataset with their own generator, such as albumentations pipelines."""
    for member in getattr(dataset, "__dict__", {}).values():
        seed = getattr(member, "set_random_seed", None)
        if callable(seed):
            seed(number)


def _stamps(value: Any) -> list[str]:
    """Return size and time of each file or folder that keyword arguments name."""
    if isinstance(value, Mapping):
        return [stamp for entry in value.values() for stamp in _stamps(entry)]
    if isinstance(value, list):
        return [stamp for entry in value for stamp in _stamps(entry)]
    if isinstance(value, str):
        with contextlib.suppress(OSError, ValueError):
            stat = os.stat(value)
            return [f"{value} {stat.st_size} {stat.st_mtime_ns}"]
    return []


KEYS = (
    "depth_px",
    "kwargs",
    "validation_target",
    "validation_kwargs",
    "split_path",
    "ignore_label",
)
SOURCE = Source(TargetDataset, check, tasks=TASKS, counts_itself=True, keys=KEYS)


def main(argv: Sequence[str]) -> None:
    """Print the answer to a process without torch that asks about a dataset."""
    answer(
        lambda: _describe(argv[0]),
        lambda error: target_error(
            KEY, str(json.loads(argv[0])["target"]), "cannot be read", error
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1:])

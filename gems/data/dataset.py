"""The interface of all data sources: samples and labels by index, the same on each rank.

Samples are float32 images or int64 tokens.
"""

from __future__ import annotations

import math
import random
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gems.config import registries
from gems.config.schema import DataConfig
from gems.errors import ConfigError
from gems.utils.registry import Registry

Split = Literal["train", "validation"]
Image = NDArray[np.float32]
Tokens = NDArray[np.int64]
Label = int | Tokens | Image
IMAGES = "images"
TOKENS = "tokens"
TOKEN_PAIRS = "token_pairs"
# label of an ignored pixel
NO_LABEL = -1
# If the largest value of a mask is at least this many times the number of values, its values are
# not class numbers.
_SPREAD = 4

LARGE = 2**28  # images with more values than this should not be held whole
_BAND_PX = 256


class Box(tuple[slice, ...]):
    """A part of a sample: a range along each axis."""

    __slots__ = ()

    def __new__(cls, *spans: slice) -> Box:
        """Return the part of these ranges, the columns last."""
        return super().__new__(cls, spans)

    def __getnewargs__(self) -> tuple[slice, ...]:
        """Return the ranges, from which a copy in another process is made."""
        return tuple(self)

    @property
    def rows(self) -> slice:
        """The range of rows."""
        return self[-2]

    @property
    def columns(self) -> slice:
        """The range of columns."""
        return self[-1]


class Dataset(ABC):
    """Labelled samples of one shape in two splits, read by index in any order.

    Images have shape (channels, height, width), volumes (channels, depth, height, width). `seed`
    determines everything random. Subclasses supply pixels and labels; this class augments and
    checks bounds. If samples are tokens, `dtype` is int64 and a label is an array: a class for each
    of several places.
    """

    dtype: ClassVar[type[np.float32] | type[np.int64]] = np.float32
    # Whether reading a sample seeds the generators of the whole process, so that no other thread
    # may draw at the same time.
    seeds_process: bool = False

    def __init__(
        self,
        shape: tuple[int, ...],
        num_classes: int,
        num_train: int,
        num_validation: int,
        seed: int,
        augment: bool,
    ) -> None:
        self.shape = shape
        self.num_classes = num_classes
        self.num_train = num_train
        self.num_validation = num_validation
        self.seed = seed
        self.augment = augment

    def num_images(self, split: Split) -> int:
        """Return the number of samples of a split."""
        return self.num_train if split == "train" else self.num_validation

    def image(self, split: Split, index: int, draw: int = 0) -> Image | Tokens:
        """Return one sample.

        An image is float32 of shape (channels, height, width), with about zero mean and unit
        variance. Training images are flipped (and turned by 90 degrees in the plane of rows and
        columns if that is square) at random, as determined by (seed, index, draw); validation
        images never are.

        Raises:
            IndexError: The index is outside the split.
        """
        self._check(split, index)
        pixels: Any = self._pixels(split, index)
        if split == "train" and self.augment:
            pixels = turned(pixels, generator(self.seed, "augment", index, draw))
        return cast("Image | Tokens", np.ascontiguousarray(pixels, dtype=self.dtype))

    @property
    def is_large(self) -> bool:
        """Whether an image is so large that it should not be held whole if avoidable."""
        return math.prod(self.shape) > LARGE

    def bands(self) -> Iterator[Box]:
        """Yield bands of an image along its first axis, of about as many values as 256 rows."""
        first_side, *inner = self.shape[1:]
        step = max(1, _BAND_PX * inner[-1] // math.prod(inner))
        for first in range(0, first_side, step):
            band = slice(first, min(first + step, first_side))
            yield Box(band, *(slice(0, side) for side in inner))

    def reads_rows(self, split: Split) -> bool:
        """Return whether `rows` reads little more than the rows it returns, never a whole image."""
        return False

    def rows(
        self, split: Split, index: int, draw: int, first: int, end: int, *inner: tuple[int, int]
    ) -> Image:
        """Return rows `first` to `end` of the image that `image` returns, or a part of them.

        `inner` are the ranges along the axes after the first; without them, all is returned.
        """
        box = self._box(first, end, inner)
        if not self.reads_rows(split):
            whole = cast(Image, self.image(split, index, draw))
            return np.ascontiguousarray(whole[:, *box])
        self._check(split, index)
        rows = np.empty((self.shape[0], *lengths(box)), dtype=np.float32)
        upright, box = self._upright(rows, box, split, index, draw)
        self._write(split, index, box, upright)
        return rows

    def reads_bytes(self, split: Split) -> bool:
        """Return whether all images of a split are stored as bytes that `byte_scale` makes values."""
        return False

    def byte_scale(self) -> tuple[Image, Image]:
        """Return the mean and deviation by which `rows` are (`byte_rows` - mean) / deviation.

        Both are of shape (channels, 1, ...), and all is computed in float32.
        """
        raise NotImplementedError

    def byte_rows(
        self, split: Split, index: int, draw: int, first: int, end: int, *inner: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """Return the stored bytes of `rows`, flipped and turned alike, if the source has bytes."""
        raise NotImplementedError

    def reads_mask_rows(self, split: Split) -> bool:
        """Return whether `mask_rows` reads little more than its rows, never a whole mask."""
        return False

    def mask_rows(
        self, split: Split, index: int, draw: int, first: int, end: int, *inner: tuple[int, int]
    ) -> Tokens:
        """Return rows `first` to `end` of the mask that `label` returns, or a part of them.

        `inner` is as in `rows`.
        """
        box = self._box(first, end, inner)
        if not self.reads_mask_rows(split):
            return np.ascontiguousarray(np.asarray(self.label(split, index, draw))[box])
        self._check(split, index)
        rows = np.empty((1, *lengths(box)), dtype=np.int64)
        upright, box = self._upright(rows, box, split, index, draw)
        upright[0] = self._mask(split, index, box)
        return cast(Tokens, rows[0])

    def label(self, split: Split, index: int, draw: int = 0) -> Label:
        """Return the label of one sample, without reading its pixels.

        The label is one of: a class, 0 <= label < num_classes; an array of classes (one for each
        token, or one for each pixel, flipped and turned as the image of the same `draw`); or
        float32 values of shape (num_classes,), for several labels and for regression.
        """
        self._check(split, index)
        label = self._label(split, index)
        if split != "train" or not self.augment or np.ndim(label) < 2:
            return label
        mask: Any = np.asarray(label)[np.newaxis]
        return cast(
            Label,
            np.ascontiguousarray(turned(mask, generator(self.seed, "augment", index, draw))[0]),
        )

    def sample(self, split: Split, index: int, draw: int = 0) -> tuple[Image | Tokens, Label]:
        """Return a sample and its label, by a single read if both are stored together."""
        return self.image(split, index, draw), self.label(split, index, draw)

    def batch(
        self, split: Split, samples: NDArray[np.int64], images: bool = True, labels: bool = True
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Return the stacked images and labels of (index, draw) pairs.

        If `images` or `labels` is False, None takes its place. A single image is not copied, unless
        it is a part of another array.
        """
        stacked: NDArray[Any] | None = None
        batch_labels: list[Label] = []
        for row, (index, draw) in enumerate(samples.tolist()):
            if images and labels:
                image, label = self.sample(split, index, draw)
                batch_labels.append(label)
            elif images:
                image = self.image(split, index, draw)
            else:
                batch_labels.append(self.label(split, index, draw))
                continue
            if stacked is None:
                if len(samples) == 1 and image.flags.owndata and image.flags.writeable:
                    stacked = image[np.newaxis]
                    continue
                stacked = np.empty((len(samples), *image.shape), dtype=image.dtype)
            stacked[row] = image
        return stacked, np.stack(list(map(_as_array, batch_labels))) if labels else None

    def name_of(self, split: Split, index: int) -> str:
        """Return the name of a sample in errors: its number, and its file if it has its own."""
        return f"sample {index} of {split}"

    def files(self) -> list[Path]:
        """Return the files that are read completely before a run, by `examine`."""
        return []

    def class_counts(self, split: Split) -> tuple[int, ...]:
        """Return the number of labels of each class.

        The largest count, as a share of all, is the accuracy of always predicting one class.
        """
        counts = np.zeros(self.num_classes, dtype=np.int64)
        for index in range(self.num_images(split)):
            labels = np.asarray(self._label(split, index), dtype=np.int64).ravel()
            counts += np.bincount(labels[labels != NO_LABEL], minlength=self.num_classes)
        return tuple(counts.tolist())

    @abstractmethod
    def _pixels(self, split: Split, index: int) -> Image | Tokens:
        """Return the sample before augmentation."""

    @abstractmethod
    def _label(self, split: Split, index: int) -> Label:
        """Return the class, the classes or the values of a sample."""

    def _write(self, split: Split, index: int, box: Box, out: Image) -> None:
        """Write a part of a sample before augmentation to `out`, if the source reads rows."""
        raise NotImplementedError

    def _mask(self, split: Split, index: int, box: Box) -> Tokens:
        """Return a part of a mask before augmentation, if the source reads rows of masks."""
        raise NotImplementedError

    def _box(self, first: int, end: int, inner: Sequence[tuple[int, int]]) -> Box:
        spans = [(first, end), *(inner or ((0, side) for side in self.shape[2:]))]
        return Box(*(slice(*span) for span in spans))

    def _upright(
        self, part: NDArray[Any], box: Box, split: Split, index: int, draw: int
    ) -> tuple[NDArray[Any], Box]:
        """Map a part of an augmented sample back to the sample before augmentation."""
        if split != "train" or not self.augment:
            return part, box
        rng = generator(self.seed, "augment", index, draw)
        return unturned(part, box, self.shape[1:], rng)

    def _check(self, split: Split, index: int) -> None:
        if not 0 <= index < self.num_images(split):
            raise IndexError(f"image {index} of {self.num_images(split)} in {split}")


Opener = TypeVar("Opener", bound=Callable[[DataConfig, int], Dataset])


@dataclass(frozen=True, slots=True)
class Source:
    """A source of samples.

    Attributes:
        open: Opens the data set for a configuration and a seed: a subclass of Dataset, or a
            function.
        check: Raises ConfigError for data that cannot be opened, without decoding an image.
        field_of_view_px: Derives the field of view of `data`.
        kind: The kind of samples that families of models read: images, tokens or token_pairs.
        tasks: Tasks for which the source has labels; the first one is the default of data.task.
        counts_itself: Whether the source counts its files and ignores data.train_samples.
        keys: Configuration keys that only some sources read.
        labelled: Whether the samples have labels; samples without labels can be used for
            prediction, but not for training.
        class_numbers: Returns classes by name, if any.
    """

    open: Callable[[DataConfig, int], Dataset]
    check: Callable[[DataConfig], object] = lambda data: None
    field_of_view_px: Callable[[DataConfig], int | None] = lambda data: data.field_of_view_px
    kind: str = IMAGES
    tasks: tuple[str, ...] = ("classification",)
    counts_itself: bool = False
    keys: tuple[str, ...] = ()
    labelled: bool = True
    class_numbers: Callable[[DataConfig], Mapping[str, int]] = lambda data: {}


DATASETS: Registry[Source] = registries.DATASETS


def dataset(name: str, **known: Any) -> Callable[[Opener], Opener]:
    """Register the decorated class or function as data=`name`.

    `known` are the other fields of `Source`.
    """

    def register(opener: Opener) -> Opener:
        DATASETS.register(name, Source(opener, **known))
        return opener

    return register


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return a new generator for (seed, purpose, key).

    Different purposes or keys give independent streams.
    """
    return np.random.default_rng((seed, zlib.crc32(purpose.encode()), *key))


@contextmanager
def seeded(seed: int, purpose: str, *key: int) -> Iterator[int]:
    """Seed the process's generators of Python, numpy and torch (if loaded) by a key.

    The generators are restored on exit. Yields the seed.
    """
    number = int(generator(seed, purpose, *key).integers(2**32))
    torch: Any = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), torch and torch.default_generator.get_state()
    random.seed(number)
    np.random.seed(number)
    if torch:
        torch.default_generator.manual_seed(number)
    try:
        yield number
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch:
            torch.default_generator.set_state(states[2])


def as_label(value: Any, data: DataConfig, task: str, name: str) -> Label:
    """Convert a label of a user's data to the form that the engine expects.

    `name` is the name of its sample. Pixels that are negative or equal to data.ignore_label become
    NO_LABEL.

    Raises:
        ConfigError: A class is outside 0 <= label < num_classes, the shape is wrong, or a value is
            not finite.
    """
    array = np.asarray(value.detach() if hasattr(value, "detach") else value)
    shape = {"classification": (), "segmentation": data.sides_px}.get(task, (data.num_classes,))
    sides = [[side for side in shape_of if side != 1] for shape_of in (array.shape, shape)]
    if array.shape != shape and array.ndim > len(shape) and sides[0] == sides[1]:
        array = array.reshape(shape)  # a shape such as (1,) or (1, height, width)
    if array.shape != shape:
        text = f"{name} has a label of shape {array.shape}, and data.task={task} takes {shape}"
        advice = "set data.task, or data.num_classes for the number of values"
        if array.shape == ():
            advice = "set data.task=classification, or let the label be an array"
        raise ConfigError("data.task", task, text, advice)
    if task in ("classification", "segmentation"):
        return _as_classes(array, data, task, name)
    values = array.astype(np.float32)
    if not np.isfinite(values).all():
        raise ConfigError("data", name, "has a label that is not finite", "repair or remove it")
    if task == "multi_label" and not np.isin(values, (0, 1)).all():
        text = f"{name} has a label other than 0 and 1"
        raise ConfigError("data.task", task, text, "set data.task=regression")
    return values


def as_mask(part: NDArray[Any], data: DataConfig, name: str) -> Tokens:
    """Convert the numbers of a part of a mask as `as_label` does.

    Raises:
        ConfigError: A class is outside 0 <= label < num_classes, or is no whole number.
    """
    return cast(Tokens, _as_classes(part, data, "segmentation", name))


def _as_classes(array: NDArray[Any], data: DataConfig, task: str, name: str) -> Label:
    if not np.issubdtype(array.dtype, np.integer) and array.dtype != bool:
        text = f"{name} has a label of type {array.dtype}, and a class is a whole number"
        raise ConfigError("data.task", task, text, "set data.task=regression, or convert the label")
    classes = array.astype(np.int64)
    is_mask = task == "segmentation"
    ignored = is_mask & ((classes < 0) | (classes == data.ignore_label))
    wrong = classes[((classes < 0) | (classes >= data.num_classes)) & ~ignored]
    if wrong.size:
        text = (
            f"{name} has label {wrong.flat[0]}, and there are classes 0 to {data.num_classes - 1}"
        )
        advice = _advice_for_values(np.unique(classes[~ignored]).tolist(), data, task)
        raise ConfigError("data.num_classes", data.num_classes, text, advice)
    classes[ignored] = NO_LABEL
    return classes if is_mask else int(classes)


def _advice_for_values(values: list[int], data: DataConfig, task: str) -> str:
    """Return advice for sorted values of a label or mask, some of which are not classes."""
    if values[0] < 0:
        return "number them from 0"
    if task != "segmentation":
        return f"set data.num_classes={values[-1] + 1} or more, or number them from 0"
    inside = [value for value in values if value < data.num_classes]
    others = values[len(inside) :]
    if values[-1] < _SPREAD * len(values):
        return (
            f"set data.num_classes={values[-1] + 1} or more, or data.ignore_label if that value is"
            " to be ignored"
        )
    # the values represent classes but are spread out, such as 0 and 255
    count = max(data.num_classes, len(values))
    classes = dict(zip(others, range(count - len(others), count), strict=True))
    pairs = ",".join(f"{value}:{number}" for value, number in classes.items())
    if data.target is not None:
        advice = f"let the dataset map values to classes ({pairs})"
    elif len(classes) == 1:
        advice = f"set data.class_map.{others[0]}={classes[others[0]]}"
    else:
        advice = f"set data.class_map={{{pairs}}}"
    if count > data.num_classes:
        advice += f" and data.num_classes={count}"
    if len(others) == 1 and len(inside) > 1:
        advice += f", or data.ignore_label={others[0]} if such pixels are to be ignored"
    return advice


def _as_array(label: Label) -> NDArray[Any]:
    array = np.asarray(label)
    return array.astype(
        np.float32 if np.issubdtype(array.dtype, np.floating) else np.int64, copy=False
    )


def turned(image: Image, rng: np.random.Generator) -> Image:
    """Return an image (channels, *sides), randomly flipped and, if its planes are square, turned.

    It is flipped along any axis. A square image has 8 possible results, any other image 4.
    """
    *flips, swap = rng.integers(2, size=image.ndim)
    image = np.flip(image, tuple(axis for axis, is_flipped in enumerate(flips, 1) if is_flipped))
    return image.swapaxes(-1, -2) if swap and image.shape[-1] == image.shape[-2] else image


def lengths(box: Box) -> tuple[int, ...]:
    """Return the length of a part along each axis."""
    return tuple(span.stop - span.start for span in box)


def unturned(
    part: NDArray[Any], box: Box, sides_px: Sequence[int], rng: np.random.Generator
) -> tuple[NDArray[Any], Box]:
    """Map a part of the image that `turned` returns back to the unturned image.

    `rng` must be in the same state as the generator passed to `turned`.

    Args:
        part: The part (channels, *sides).
        box: Where it is in the turned image.
        sides_px: The sides of the whole image.
        rng: The generator.

    Returns:
        A view of `part` in the orientation of the unturned image, and its box in that image.
    """
    *flips, swap = rng.integers(2, size=part.ndim)
    spans = list(box)
    if swap and sides_px[-1] == sides_px[-2]:
        part = part.swapaxes(-1, -2)
        spans[-2:] = spans[:-3:-1]
    for axis in (axis for axis, is_flipped in enumerate(flips) if is_flipped):
        part = np.flip(part, 1 + axis)
        spans[axis] = slice(sides_px[axis] - spans[axis].stop, sides_px[axis] - spans[axis].start)
    return part, Box(*spans)


def batch_indices(num_images: int, seed: int, step: int, global_batch: int) -> NDArray[np.int64]:
    """Return the (index, draw) pairs of optimizer step `step`, of shape (global_batch, 2).

    A run is one sequence of epochs; each epoch is a permutation of all images drawn from (seed,
    epoch). A step takes the next `global_batch` entries and may span epochs. `draw` is the epoch,
    which seeds the augmentation.

    Raises:
        ValueError: A count is below 1, or the step is negative.
    """
    if num_images < 1 or global_batch < 1 or step < 0:
        raise ValueError(f"num_images={num_images}, global_batch={global_batch}, step={step}")
    place = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epoch, offset = np.divmod(place, num_images)
    index = np.empty(global_batch, dtype=np.int64)
    for number in np.unique(epoch):
        here = epoch == number
        index[here] = _permutation(num_images, seed, int(number))[offset[here]]
    return np.stack([index, epoch], axis=1)


def micro_batch_slice(
    replica: int, micro_batch: int, num_micro_batches: int, micro_batch_size: int
) -> slice:
    """Return the slice of a replica's micro-batch in the global batch.

    A global batch is replicas x num_micro_batches x micro_batch_size samples in that order.
    `num_micro_batches` counts the micro-batches of one replica and step, over both directions.

    Raises:
        ValueError: The micro-batch is outside 0 <= micro_batch < num_micro_batches.
    """
    if not 0 <= micro_batch < num_micro_batches:
        raise ValueError(f"micro-batch {micro_batch} of {num_micro_batches}")
    start = (replica * num_micro_batches + micro_batch) * micro_batch_size
    return slice(start, start + micro_batch_size)


@lru_cache(maxsize=4)
def _permutation(num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = generator(seed, "epoch", epoch).permutation(num_images)
    order.flags.writeable = False
    return order

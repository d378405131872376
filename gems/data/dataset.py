"""What every source offers: samples (float32 images, or int64 tokens) and labels by index, the same on each rank."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gems.config import registries
from gems.config.schema import DataConfig
from gems.utils.registry import Registry

Split = Literal["train", "validation"]
Image = NDArray[np.float32]
Tokens = NDArray[np.int64]
IMAGES, TOKENS, TOKEN_PAIRS = "images", "tokens", "token_pairs"


class Dataset(ABC):
    """Labelled samples of one shape in two splits, read by index in any order: images (channels, height, width).

    `seed` fixes everything random. Subclasses give the pixels and labels; augmentation and bounds are here. Where
    samples are tokens, `dtype` is int64, and a label is an array: a class for each of several places.
    """

    dtype: ClassVar[type[np.float32] | type[np.int64]] = np.float32

    def __init__(
        self, shape: tuple[int, ...], num_classes: int, num_train: int, num_validation: int, seed: int, augment: bool
    ) -> None:
        self.shape = shape
        self.num_classes = num_classes
        self.num_train = num_train
        self.num_validation = num_validation
        self.seed = seed
        self.augment = augment

    def num_images(self, split: Split) -> int:
        """Return how many samples a split has."""
        return self.num_train if split == "train" else self.num_validation

    def image(self, split: Split, index: int, draw: int = 0) -> Image | Tokens:
        """Return one sample: an image, float32 of shape (channels, height, width), about zero mean and unit variance.

        Training images are flipped (and turned by 90 degrees when square) as (seed, index, draw) says;
        validation images never. Raises IndexError outside the split.
        """
        self._check(split, index)
        pixels: Any = self._pixels(split, index)
        if split == "train" and self.augment:
            pixels = turned(pixels, generator(self.seed, "augment", index, draw))
        return cast("Image | Tokens", np.ascontiguousarray(pixels, dtype=self.dtype))

    def label(self, split: Split, index: int, draw: int = 0) -> int | Tokens | Image:
        """Return the label of one sample, without reading its pixels.

        It is a class, 0 <= label < num_classes; several as an array (a token each, or a pixel each, flipped and turned
        as the image of the same `draw`); or float32 values of shape (num_classes,), for several labels and regression.
        """
        self._check(split, index)
        return self._label(split, index)

    def class_counts(self, split: Split) -> tuple[int, ...]:
        """Return the number of labels of each class.

        The largest share of them is the accuracy of always guessing one class.
        """
        labels = np.array([self._label(split, index) for index in range(self.num_images(split))], dtype=np.int64)
        return tuple(np.bincount(labels.ravel(), minlength=self.num_classes).tolist())

    @abstractmethod
    def _pixels(self, split: Split, index: int) -> Image | Tokens:
        """Return the sample before augmentation."""

    @abstractmethod
    def _label(self, split: Split, index: int) -> int | Tokens:
        """Return the class, or classes."""

    def _check(self, split: Split, index: int) -> None:
        if not 0 <= index < self.num_images(split):
            raise IndexError(f"image {index} of {self.num_images(split)} in {split}")


Opener = TypeVar("Opener", bound=Callable[[DataConfig, int], Dataset])


@dataclass(frozen=True, slots=True)
class Source:
    """A source of samples, whose `kind` is what the families of models read: images, tokens or token_pairs.

    `open` opens the data set from its configuration and a seed: a subclass of Dataset, or a function. `check` raises
    ConfigError for data that cannot be opened, without decoding an image; `field_of_view_px` derives that of `data`. If
    it `counts_itself`, the number of samples is that of the files, whatever data.train_samples is. The source gives the
    labels of the first of its `tasks`, unless data.task says another.
    """

    open: Callable[[DataConfig, int], Dataset]
    check: Callable[[DataConfig], None] = lambda data: None
    field_of_view_px: Callable[[DataConfig], int | None] = lambda data: data.field_of_view_px
    kind: str = IMAGES
    tasks: tuple[str, ...] = ("classification",)
    counts_itself: bool = False


DATASETS: Registry[Source] = registries.DATASETS


def dataset(name: str, **known: Any) -> Callable[[Opener], Opener]:
    """Register the class or function below as data=`name`; `known` are the other fields of `Source`."""

    def register(opener: Opener) -> Opener:
        DATASETS.register(name, Source(opener, **known))
        return opener

    return register


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return a fresh generator for (seed, purpose, key); other purposes or keys are independent streams."""
    return np.random.default_rng((seed, zlib.crc32(purpose.encode()), *key))


def turned(image: Image, rng: np.random.Generator) -> Image:
    """Return a (channels, height, width) image flipped and, when square, turned: one of 8 ways, else of 4."""
    flip_rows, flip_columns, swap = rng.integers(2, size=3)
    if flip_rows:
        image = image[:, ::-1, :]
    if flip_columns:
        image = image[:, :, ::-1]
    if swap and image.shape[1] == image.shape[2]:
        image = image.transpose(0, 2, 1)
    return image


def batch_indices(num_images: int, seed: int, step: int, global_batch: int) -> NDArray[np.int64]:
    """Return the (index, draw) pairs of optimizer step `step`, an array of shape (global_batch, 2).

    The run is one sequence of epochs, each a permutation of all images drawn from (seed, epoch); a step takes
    the next `global_batch` of it and may straddle epochs. `draw` is the epoch, which seeds the augmentation.
    Raises ValueError for counts below 1 or a negative step.
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


def micro_batch_slice(replica: int, micro_batch: int, num_micro_batches: int, micro_batch_size: int) -> slice:
    """Return where a micro-batch of a replica lies in the global batch.

    A global batch is replicas x num_micro_batches x micro_batch_size samples in that order;
    `num_micro_batches` counts those of one replica and step, over both directions.
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

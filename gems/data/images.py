"""Images from files: decoded, fitted, augmented by a transform, and normalised."""

from __future__ import annotations

import inspect
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.data.dataset import (
    DATASETS,
    NO_LABEL,
    Box,
    Dataset,
    Image,
    Label,
    Source,
    Split,
    Tokens,
    lengths,
    seeded,
)
from gems.data.files.reader import gives_parts, is_of_bytes, read_image, read_nodata, read_through
from gems.data.files.tiff import read_tiff
from gems.data.files.values import Values, checked, is_nodata, range_of
from gems.errors import ConfigError
from gems.utils.cache import cached
from gems.utils.targets import call_target, load_target, target_error

_MAX_THREADS = 8
# mean and standard deviation of each channel as shares of the range of values
FIXED = (127.5 / 255, 64.0 / 255)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# keys of all sources that read images from files
KEYS = ("bits", "page", "nodata", "normalization", "mean", "std", "transform", "transform_kwargs")
EXTRA = {"torchvision": "vision", "albumentations": "albumentations"}

Kind = TypeVar("Kind", bound="ImageDataset")


class ImageDataset(Dataset):
    """Images from files; an image has a label or a mask.

    Subclasses supply the values of an image, fitted to the shape but not normalised, and its label.
    With data.transform a training image and its mask are transformed instead of flipped. Data
    without labels have only a validation split.
    """

    needs_training: ClassVar[bool] = True
    class_numbers: Mapping[str, int] = {}  # by name, if classes have names

    def __init__(self, data: DataConfig, num_train: int, num_validation: int, seed: int) -> None:
        check_images(data)
        shape = (data.channels, *data.sides_px)
        augment = data.augment and data.transform is None
        super().__init__(shape, data.num_classes, num_train, num_validation, seed, augment)
        for split, count in (("train", num_train), ("validation", num_validation)):
            if not count and (split == "validation" or self.needs_training):
                raise ConfigError(
                    "data.path", data.path, f"no image is left for {split}", "add images"
                )
        self.config = data
        self.seeds_process = data.transform is not None
        self._transform: Any = None
        self._normalization: tuple[Image, Image] | None = None
        self._empty: tuple[tuple[Split, int], NDArray[np.bool_]] | None = None
        self._by_rows: dict[Split, bool] = {}
        self._of_bytes: dict[Split, bool] = {}

    @abstractmethod
    def values(self, split: Split, index: int) -> Values:
        """Return an image with the values of its file, in the dataset's shape."""

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of the image that `values` returns, for sources that read rows."""
        return self.values(split, index)[:, box.rows, box.columns]

    def nodata(self, split: Split, index: int) -> float | None:
        """Return the nodata value of an image, or None if it has none."""
        return None

    @abstractmethod
    def identity(self, split: Split) -> str:
        """Return a text that changes if images of a split change."""

    def image(self, split: Split, index: int, draw: int = 0) -> Image | Tokens:
        """Return one sample as `Dataset.image` does, normalised."""
        if self._is_transformed(split):
            return self.sample(split, index, draw)[0]
        return super().image(split, index, draw)

    def label(self, split: Split, index: int, draw: int = 0) -> Label:
        """Return the label of one sample as `Dataset.label` does.

        A mask is transformed together with its image.
        """
        label = super().label(split, index, draw)
        if self._is_transformed(split) and np.ndim(label) >= 2:
            return self.sample(split, index, draw)[1]
        return label

    def sample(self, split: Split, index: int, draw: int = 0) -> tuple[Image | Tokens, Label]:
        """Return an image and its label; a mask is transformed together with its image."""
        if not self._is_transformed(split):
            return self.image(split, index, draw), super().label(split, index, draw)
        values, gaps = self._known(split, index)
        fill = self._fill(values.dtype)
        if gaps is not None:
            values = np.where(gaps, fill, values)
        label = super().label(split, index, draw)
        mask = np.asarray(label) if np.ndim(label) >= 2 else None
        with seeded(self.seed, "transform", index, draw) as number:
            values, mask = self._transformed(values, mask, number, self.name_of(split, index))
        image = self._normalised(values)
        if gaps is not None:
            image[values == fill] = 0
        return image, label if mask is None else mask

    def prepare(self) -> None:
        """Compute and cache the mean and standard deviation of the training split for all ranks."""
        self.statistics()

    def reads_bytes(self, split: Split) -> bool:
        """Return whether all images of a split are bytes, without nodata or a transform."""
        if split not in self._of_bytes:
            self._of_bytes[split] = (
                not self._is_transformed(split)
                and self._has_bytes(split)
                and all(
                    self.nodata(split, index) is None for index in range(self.num_images(split))
                )
            )
        return self._of_bytes[split]

    def byte_scale(self) -> tuple[Image, Image]:
        """Return the mean and deviation of bytes."""
        peak = np.float32(range_of(np.dtype(np.uint8), self.config.bits))
        mean, deviation = self.statistics()
        return mean * peak, deviation * peak

    def byte_rows(
        self, split: Split, index: int, draw: int, first: int, end: int, *inner: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """Return the stored bytes of `rows`."""
        self._check(split, index)
        box = self._box(first, end, inner)
        rows = np.empty((self.shape[0], *lengths(box)), dtype=np.uint8)
        upright, box = self._upright(rows, box, split, index, draw)
        if self.reads_rows(split):
            upright[...] = self.part(split, index, box)
        else:
            upright[...] = self.values(split, index)[:, *box]
        return rows

    def _has_bytes(self, split: Split) -> bool:
        """Return whether `values` are bytes for all images of a split."""
        return False

    def _is_transformed(self, split: Split) -> bool:
        """Return whether a transform needs whole images of a split."""
        return split == "train" and self.config.transform is not None

    def _pixels(self, split: Split, index: int) -> Image:
        values, gaps = self._known(split, index)
        image = self._normalised(values)
        if gaps is not None:
            image[gaps] = 0
        return image

    def _known(self, split: Split, index: int) -> tuple[Values, NDArray[np.bool_] | None]:
        """Return an image and a mask of its nodata values.

        The pixels without data are stored, because the image's label needs them.
        """
        values = self.values(split, index)
        nodata = self.nodata(split, index)
        gaps = None if nodata is None else is_nodata(values, nodata)
        self._empty = None if gaps is None else ((split, index), np.asarray(gaps.all(axis=0)))
        return values, gaps

    def _write(self, split: Split, index: int, box: Box, out: Image) -> None:
        self._normalised(self.part(split, index, box), self.nodata(split, index), out)

    def _normalised(
        self, values: Values, nodata: float | None = None, out: Image | None = None
    ) -> Image:
        """Return float32 values with about zero mean and unit variance; values without data are 0.

        The result is `out`, or one new array.
        """
        mean, deviation = self.statistics()
        peak = np.float32(range_of(values.dtype, self.config.bits))
        normalised = np.empty(values.shape, dtype=np.float32) if out is None else out
        np.subtract(values, mean * peak, out=normalised, casting="unsafe", dtype=np.float32)
        normalised /= deviation * peak
        if nodata is not None:
            normalised[is_nodata(values, nodata)] = 0
        return normalised

    def _fill(self, dtype: np.dtype[Any]) -> Values:
        """Return the mean as image values, to fill pixels without data before a transform.

        Transforms do not know nodata values.
        """
        mean = self.statistics()[0] * np.float32(range_of(dtype, self.config.bits))
        return mean.astype(dtype)

    def _examine_label(self, split: Split, index: int) -> None:
        """Read a label completely, a mask band by band if it can be."""
        if not self.reads_mask_rows(split):
            self._label(split, index)
            return
        for box in self.bands():
            self._mask(split, index, box)

    def _without_nodata(
        self, label: Label, split: Split, index: int, box: Box | None = None
    ) -> Label:
        """Return a mask, or its part in `box`, with NO_LABEL where no channel has data.

        Other labels are returned unchanged.
        """
        nodata = self.nodata(split, index) if np.ndim(label) >= 2 else None
        if nodata is None:
            return label
        mask = np.asarray(label)
        seen = self._empty  # the gaps of the image that any thread read last
        if seen is not None and seen[0] == (split, index):
            mask[seen[1] if box is None else seen[1][box]] = NO_LABEL
        else:
            read = self.values if box is None else partial(self.part, box=box)
            mask[is_nodata(read(split, index), nodata).all(axis=0)] = NO_LABEL
        return mask

    def statistics(self) -> tuple[Image, Image]:
        """Return the mean and standard deviation of each channel as shares of the range.

        Both have shape (channels, 1, 1), of volumes (channels, 1, 1, 1).
        """
        if self._normalization is None:
            data = self.config
            channels = self.shape[0]
            if data.mean is not None or data.std is not None:
                statistics: tuple[Any, Any] = data.mean or 0.0, data.std or 1.0
            else:
                known = {"fixed": FIXED, "imagenet": IMAGENET, "none": (0.0, 1.0)}
                statistics = (
                    known[data.normalization] if data.normalization in known else self._computed()
                )
            mean, deviation = (
                np.resize(
                    np.asarray(part, dtype=np.float64), (channels, *[1] * len(self.shape[1:]))
                )
                for part in statistics
            )
            self._normalization = mean.astype(np.float32), deviation.astype(np.float32)
        return self._normalization

    def _computed(self) -> tuple[list[float], list[float]]:
        """Return the cached mean and standard deviation of each channel over the training split."""
        channels = self.shape[0]
        data = self.config
        key = repr(
            (data.name, self.shape, data.bits, data.page, data.nodata, self.identity("train"))
        )

        def sums(index: int) -> NDArray[np.float64]:
            """Return the count, sum and sum of squares of each channel."""
            found = np.zeros((3, channels))
            nodata = self.nodata("train", index)
            # in bands, because the whole image as float64 would take eight times the file's bytes
            for values in self._bands_of(index):
                band = values.reshape(channels, -1).astype(np.float64)
                band /= range_of(values.dtype, data.bits)
                known = np.full(channels, band.shape[1])
                if nodata is not None:
                    gaps = is_nodata(values, nodata).reshape(band.shape)
                    band[gaps] = 0
                    known -= gaps.sum(1)
                found += np.stack([known, band.sum(1), np.square(band).sum(1)])
            return found

        def make() -> dict[str, Any]:
            total = np.zeros((3, channels))
            with threads() as pool:
                for found in ordered(pool, sums, self.num_train):
                    total += found
            mean, square = total[1:] / np.maximum(total[0], 1)
            deviation = np.sqrt(np.maximum(square - mean**2, 0))
            if not deviation.all():
                raise ConfigError(
                    "data.normalization",
                    "computed",
                    "a channel is the same everywhere",
                    "give data.std",
                )
            return {"mean": mean.tolist(), "std": deviation.tolist()}

        document = cached(None, "normalization", key, make)
        return document["mean"], document["std"]

    def _bands_of(self, index: int) -> Iterator[Values]:
        """Yield a training image in bands, from top to bottom; read large images band by band."""
        whole = None if self.is_large and self.reads_rows("train") else self.values("train", index)
        for box in self.bands():
            yield self.part("train", index, box) if whole is None else whole[:, box[0]]

    def _transformed(
        self, values: Values, mask: NDArray[Any] | None, number: int, name: str
    ) -> tuple[Values, NDArray[np.int64] | None]:
        """Return an image and its mask after data.transform, called as its library requires.

        Values keep their type. Images that are not uint8 are passed as float32 from 0 to 1.
        """
        key = "data.transform"
        target = str(self.config.transform)
        if self._transform is None:
            self._transform = load_transform(self.config)
        peak = range_of(values.dtype, self.config.bits)
        given = (
            values if values.dtype == np.uint8 else (values / np.float32(peak)).astype(np.float32)
        )
        try:
            if is_of_albumentations(self._transform):
                transformed = _by_albumentations(self._transform, given, mask, number)
            else:
                transformed = _by_torch(self._transform, given, mask)
        except Exception as error:
            raise target_error(key, target, f"fails for {name}", error) from error
        image, made_mask = transformed
        if image.dtype != given.dtype:
            text = f"gives values of type {image.dtype} for {given.dtype}"
            raise ConfigError(
                key, target, text, "leave the scaling to data.normalization, data.mean and data.std"
            )
        if image.shape != self.shape or (
            mask is not None and (made_mask is None or made_mask.shape != mask.shape)
        ):
            shapes = f"an image of {image.shape}" + (
                "" if made_mask is None else f" and a mask of {made_mask.shape}"
            )
            raise ConfigError(
                key,
                target,
                f"gives {shapes}, and the keys say {self.shape}",
                "crop and resize to these",
            )
        if image.dtype != values.dtype:
            image = image * np.float32(peak)
            image = (np.rint(image) if values.dtype.kind in "iu" else image).astype(values.dtype)
        return image, None if made_mask is None else made_mask.astype(np.int64)


class FileDataset(ImageDataset):
    """Images with one file each; `paths` are those of each split."""

    def __init__(self, data: DataConfig, paths: dict[Split, list[Path]], seed: int) -> None:
        super().__init__(data, len(paths["train"]), len(paths["validation"]), seed)
        self._paths = paths
        self._nodata: dict[Path, float | None] = {}

    def path(self, split: Split, index: int) -> Path:
        """Return the file of an image."""
        return self._paths[split][index]

    def files(self) -> list[Path]:
        """Return all files that the dataset reads."""
        return [path for paths in self._paths.values() for path in paths]

    def identity(self, split: Split) -> str:
        """Return the names, sizes and times of a split's files."""
        return stamps(self._paths[split])

    def name_of(self, split: Split, index: int) -> str:
        """Return the file of an image, as text."""
        return str(self.path(split, index))

    def values(self, split: Split, index: int) -> Values:
        """Return the values of an image, scaled to cover height x width; the middle is kept."""
        return read_image(self.path(split, index), self.config, self.nodata(split, index))

    def nodata(self, split: Split, index: int) -> float | None:
        """Return the nodata value of an image, from data.nodata or the file's own tag."""
        path = self.path(split, index)
        if path not in self._nodata:
            self._nodata[path] = read_nodata(path, self.config)
        return self._nodata[path]

    def examine(self, split: Split, index: int) -> None:
        """Read an image, and its mask if it has one, completely.

        Raises:
            ConfigError: They would be misread.
        """
        read_through(self.path(split, index), self.config, self.nodata(split, index))

    def reads_rows(self, split: Split) -> bool:
        """Return whether all images are TIFF files readable in parts, and no transform applies."""
        if self._is_transformed(split):
            return False
        if split not in self._by_rows:
            self._by_rows[split] = all(
                gives_parts(path, self.config) for path in self._paths[split]
            )
        return self._by_rows[split]

    def _has_bytes(self, split: Split) -> bool:
        return all(is_of_bytes(path, self.config) for path in self._paths[split])

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of the image that `values` returns."""
        path = self.path(split, index)
        data = self.config
        values = read_tiff(path, data.page, data.channels, (box.rows, box.columns))
        return checked(values, data, str(path), self.nodata(split, index), box.rows.start)


def image_source(name: str, **known: Any) -> Callable[[type[Kind]], type[Kind]]:
    """Register the decorated dataset as data=`name`; `known` are the other fields of `Source`.

    Its constructor reads no pixels, so data are checked by opening them.
    """

    def register(kind: Any) -> Any:
        source = Source(
            kind,
            check=partial(kind, seed=0),
            counts_itself=True,
            class_numbers=lambda data: kind(data, 0).class_numbers,
            **known,
        )
        DATASETS.register(name, source)
        return kind

    return register


def check_images(data: DataConfig) -> None:
    """Raise ConfigError if keys of normalisation and transform contradict each other."""
    for key, numbers in (("data.mean", data.mean), ("data.std", data.std)):
        if numbers is not None and len(numbers) not in (1, data.channels):
            raise ConfigError(
                key,
                numbers,
                f"has {len(numbers)} entries",
                f"give one, or data.channels={data.channels}",
            )
    if data.normalization == "imagenet" and data.channels != 3 and data.mean is None:
        text = f"is of 3 channels, and data.channels={data.channels}"
        raise ConfigError(
            "data.normalization", "imagenet", text, "use computed, or give data.mean and data.std"
        )
    if data.transform_kwargs and data.transform is None:
        raise ConfigError(
            "data.transform_kwargs", data.transform_kwargs, "is for data.transform", "name it"
        )
    if data.transform is not None:
        library = data.transform.replace(":", ".").partition(".")[0]
        if library in EXTRA and find_spec(library) is None:
            advice = f"pip install gems-train[{EXTRA[library]}], from the same place as torch"
            raise ConfigError(
                "data.transform", data.transform, f"needs {library}, which is not installed", advice
            )


def load_transform(data: DataConfig) -> Callable[..., Any]:
    """Return the transform that data.transform names.

    A class or a factory is called with the keyword arguments; a factory is a function that needs no
    other arguments. Any other function is the transform itself, and gets the keyword arguments too.
    """
    key = "data.transform"
    target = str(data.transform)
    loaded = load_target(key, target)
    if not isinstance(loaded, type):
        try:
            inspect.signature(loaded).bind(**data.transform_kwargs)
        except (TypeError, ValueError):
            return partial(loaded, **data.transform_kwargs)
    transform: Callable[..., Any] = call_target(key, target, data.transform_kwargs, None)
    return transform


def is_of_albumentations(transform: Any) -> bool:
    """Return whether a transform belongs to albumentations, which passes arrays by name."""
    return any(base.__module__.startswith("albumentations.") for base in type(transform).__mro__)


def _by_albumentations(
    transform: Any, values: Values, mask: NDArray[Any] | None, number: int
) -> tuple[Values, NDArray[Any] | None]:
    if hasattr(transform, "set_random_seed"):
        transform.set_random_seed(number)
    given = {"image": np.ascontiguousarray(values.transpose(1, 2, 0))}
    if mask is not None:
        given["mask"] = mask.astype(np.int32)
    found = transform(**given)
    return np.asarray(found["image"]).transpose(2, 0, 1), (
        np.asarray(found["mask"]) if mask is not None else None
    )


def _by_torch(
    transform: Any, values: Values, mask: NDArray[Any] | None
) -> tuple[Values, NDArray[Any] | None]:
    torch = sys.modules["torch"]
    wrap = sys.modules.get("torchvision.tv_tensors")
    tensors = [torch.from_numpy(np.array(array)) for array in (values, mask) if array is not None]
    if wrap is not None:
        tensors = [
            kind(tensor) for kind, tensor in zip((wrap.Image, wrap.Mask), tensors, strict=False)
        ]
    result = transform(*tensors)
    arrays = [
        array.numpy() for array in (result if isinstance(result, tuple | list) else (result,))
    ]
    return arrays[0], arrays[1] if mask is not None else None


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads that decode images; an error cancels calls that have not begun."""
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def ordered(pool: ThreadPoolExecutor, function: Any, number: int) -> Iterator[Any]:
    """Yield function(0) to function(number - 1) in order, with a few of them in progress."""
    indices = iter(range(number))
    running = [pool.submit(function, index) for index in islice(indices, 2 * _MAX_THREADS)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(function, index) for index in islice(indices, 1)]


def stamps(paths: Sequence[Path]) -> str:
    """Return a text with the names, sizes and times of files."""
    return repr([(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths])

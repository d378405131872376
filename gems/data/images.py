"""Images of files: decoded, fitted, augmented by a transform, and normalised."""

from __future__ import annotations

import inspect
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.data.dataset import Box, Dataset, Image, Label, Split, Tokens, seeded
from gems.data.tiff import part_type, read_tiff
from gems.errors import ConfigError
from gems.utils.cache import cached
from gems.utils.targets import call_target, load_target, target_error

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
TIFF_SUFFIXES = (".tif", ".tiff")
_MAX_THREADS = 8
_BYTE = 255.0
# Mean and deviation of each channel as shares of the range of values.
FIXED = (127.5 / _BYTE, 64.0 / _BYTE)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Keys of all sources that read images of files.
KEYS = ("bits", "page", "normalization", "mean", "std", "transform", "transform_kwargs")
EXTRA = {"torchvision": "vision", "albumentations": "albumentations"}

Values = NDArray[Any]  # (channels, height, width), of the file's own type


class ImageDataset(Dataset):
    """Images of files, whose labels are by image or masks.

    Subclasses give the values of an image, fitted to the shape but not normalised, and its label. With data.transform a
    training image is transformed instead of flipped, its mask alike. Data without labels are a validation split alone.
    """

    needs_training: ClassVar[bool] = True

    def __init__(self, data: DataConfig, num_train: int, num_validation: int, seed: int) -> None:
        shape = (data.channels, data.height_px, data.width_px)
        augment = data.augment and data.transform is None
        super().__init__(shape, data.num_classes, num_train, num_validation, seed, augment)
        for split, count in (("train", num_train), ("validation", num_validation)):
            if not count and (split == "validation" or self.needs_training):
                raise ConfigError("data.path", data.path, f"no image is left for {split}", "add images")
        self.config = data
        self.seeds_process = data.transform is not None
        self._transform: Any = None
        self._normalization: tuple[Image, Image] | None = None
        self._by_rows: dict[Split, bool] = {}

    @abstractmethod
    def values(self, split: Split, index: int) -> Values:
        """Return an image as it is in its file, of the dataset's shape."""

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of what `values` returns, of a source that reads rows."""
        return self.values(split, index)[:, box.rows, box.columns]

    @abstractmethod
    def identity(self, split: Split) -> str:
        """Return a text that changes when images of a split do."""

    def image(self, split: Split, index: int, draw: int = 0) -> Image | Tokens:
        """Return one sample as `Dataset.image`, normalised."""
        if split != "train" or self.config.transform is None:
            return super().image(split, index, draw)
        return self.sample(split, index, draw)[0]

    def label(self, split: Split, index: int, draw: int = 0) -> Label:
        """Return the label of one sample as `Dataset.label`; a mask is transformed as its image."""
        found = super().label(split, index, draw)
        if split != "train" or self.config.transform is None or np.ndim(found) != 2:
            return found
        return self.sample(split, index, draw)[1]

    def sample(self, split: Split, index: int, draw: int = 0) -> tuple[Image | Tokens, Label]:
        """Return an image and its label, which is transformed alike if it is a mask."""
        label = super().label(split, index, draw)
        if split != "train" or self.config.transform is None:
            return self.image(split, index, draw), label
        mask = np.asarray(label) if np.ndim(label) == 2 else None
        with seeded(self.seed, "transform", index, draw) as number:
            values, mask = self._transformed(self.values(split, index), mask, number, self.name_of(split, index))
        return self._normalised(values), label if mask is None else mask

    def prepare(self) -> None:
        """Compute what the cache keeps for all ranks: mean and deviation of the training split."""
        self.statistics()

    def _is_transformed(self, split: Split) -> bool:
        """Return whether a transform needs whole images of a split."""
        return split == "train" and self.config.transform is not None

    def _pixels(self, split: Split, index: int) -> Image:
        return self._normalised(self.values(split, index))

    def _write(self, split: Split, index: int, box: Box, out: Image) -> None:
        self._normalised(self.part(split, index, box), out=out)

    def _normalised(self, values: Values, out: Image | None = None) -> Image:
        """Return float32 values of about zero mean and unit variance, in `out` or one new array."""
        mean, deviation = self.statistics()
        peak = np.float32(range_of(values.dtype, self.config.bits))
        made = np.empty(values.shape, dtype=np.float32) if out is None else out
        np.subtract(values, mean * peak, out=made, casting="unsafe", dtype=np.float32)
        made /= deviation * peak
        return made

    def statistics(self) -> tuple[Image, Image]:
        """Return mean and deviation of each channel, as shares of the range, of shape (channels, 1, 1)."""
        if self._normalization is None:
            data, channels = self.config, self.shape[0]
            if data.mean is not None or data.std is not None:
                found: tuple[Any, Any] = data.mean or 0.0, data.std or 1.0
            else:
                known = {"fixed": FIXED, "imagenet": IMAGENET, "none": (0.0, 1.0)}
                found = known[data.normalization] if data.normalization in known else self._computed()
            mean, deviation = (np.resize(np.asarray(part, dtype=np.float64), (channels, 1, 1)) for part in found)
            self._normalization = mean.astype(np.float32), deviation.astype(np.float32)
        return self._normalization

    def _computed(self) -> tuple[list[float], list[float]]:
        """Return mean and deviation of each channel over the training split, which the cache keeps."""
        channels, height, width = self.shape
        key = repr((self.config.name, self.shape, self.config.bits, self.config.page, self.identity("train")))

        def sums(index: int) -> NDArray[np.float64]:
            found = np.zeros((2, channels))
            for values in self._bands_of(index):  # as float64 the whole would be eight times the file's bytes
                band = values.reshape(channels, -1).astype(np.float64)
                band /= range_of(values.dtype, self.config.bits)
                found += np.stack([band.sum(1), np.square(band).sum(1)])
            return found

        def make() -> dict[str, Any]:
            total = np.zeros((2, channels))
            with threads() as pool:
                for found in ordered(pool, sums, self.num_train):
                    total += found
            mean, square = total / (self.num_train * height * width)
            deviation = np.sqrt(np.maximum(square - mean**2, 0))
            if not deviation.all():
                raise ConfigError("data.normalization", "computed", "a channel is the same everywhere", "give data.std")
            return {"mean": mean.tolist(), "std": deviation.tolist()}

        kept = cached(None, "normalization", key, make)
        return kept["mean"], kept["std"]

    def _bands_of(self, index: int) -> Iterator[Values]:
        """Yield a training image in bands, downwards, which are read one by one if it is large."""
        whole = None if self.is_large and self.reads_rows("train") else self.values("train", index)
        for box in self.bands():
            yield self.part("train", index, box) if whole is None else whole[:, box.rows]

    def _transformed(
        self, values: Values, mask: NDArray[Any] | None, number: int, name: str
    ) -> tuple[Values, NDArray[np.int64] | None]:
        """Return an image and its mask by data.transform, called as its library wants; values keep their type.

        Images that are not of bytes are given as float32 from 0 to 1.
        """
        key, target = "data.transform", str(self.config.transform)
        if self._transform is None:
            self._transform = load_transform(self.config)
        peak = range_of(values.dtype, self.config.bits)
        given = values if values.dtype == np.uint8 else (values / np.float32(peak)).astype(np.float32)
        try:
            if is_of_albumentations(self._transform):
                found = _by_albumentations(self._transform, given, mask, number)
            else:
                found = _by_torch(self._transform, given, mask)
        except Exception as error:
            raise target_error(key, target, f"fails for {name}", error) from error
        made, made_mask = found
        if made.dtype != given.dtype:
            text = f"gives values of type {made.dtype} for {given.dtype}"
            raise ConfigError(key, target, text, "leave the scaling to data.normalization, data.mean and data.std")
        if made.shape != self.shape or (mask is not None and (made_mask is None or made_mask.shape != mask.shape)):
            shapes = f"an image of {made.shape}" + ("" if made_mask is None else f" and a mask of {made_mask.shape}")
            raise ConfigError(key, target, f"gives {shapes}, and the keys say {self.shape}", "crop and resize to these")
        if made.dtype != values.dtype:
            made = (made * np.float32(peak)).astype(values.dtype)
        return made, None if made_mask is None else made_mask.astype(np.int64)


class FileDataset(ImageDataset):
    """Images that have a file each."""

    @abstractmethod
    def path(self, split: Split, index: int) -> Path:
        """Return the file of an image."""

    def name_of(self, split: Split, index: int) -> str:
        """Return the file of an image, as text."""
        return str(self.path(split, index))

    def values(self, split: Split, index: int) -> Values:
        """Return the bytes of an image, scaled to cover height x width, its middle kept."""
        return read_image(self.path(split, index), self.config)

    def reads_rows(self, split: Split) -> bool:
        """Return whether all images are TIFF files that are read in parts, and nothing transforms them."""
        if self._is_transformed(split):
            return False
        if split not in self._by_rows:
            self._by_rows[split] = all(
                gives_parts(self.path(split, index), self.config) for index in range(self.num_images(split))
            )
        return self._by_rows[split]

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of `values`."""
        path, data = self.path(split, index), self.config
        return checked(read_tiff(path, data.page, data.channels, box), data, str(path))


def gives_parts(path: Path, data: DataConfig) -> bool:
    """Return whether `read_tiff` gives parts of a file as `read_image` does the whole, and with less memory."""
    if path.suffix.lower() not in TIFF_SUFFIXES or data.channels == max(MODES):  # which may be an alpha channel
        return False
    dtype = part_type(path, data.page, data.channels, (data.height_px, data.width_px))
    is_wide = data.bits not in (None, 8)
    return dtype is not None and (data.channels not in MODES or dtype == (np.uint16 if is_wide else np.uint8))


def check_images(data: DataConfig) -> None:
    """Raise ConfigError for keys of normalisation and transform that do not fit together."""
    for key, given in (("data.mean", data.mean), ("data.std", data.std)):
        if given is not None and len(given) not in (1, data.channels):
            raise ConfigError(key, given, f"has {len(given)} entries", f"give one, or data.channels={data.channels}")
    if data.normalization == "imagenet" and data.channels != 3 and data.mean is None:
        text = f"is of 3 channels, and data.channels={data.channels}"
        raise ConfigError("data.normalization", "imagenet", text, "use computed, or give data.mean and data.std")
    if data.transform_kwargs and data.transform is None:
        raise ConfigError("data.transform_kwargs", data.transform_kwargs, "is for data.transform", "name it")
    if data.transform is not None:
        library = data.transform.replace(":", ".").partition(".")[0]
        if library in EXTRA and find_spec(library) is None:
            advice = f"pip install gems-train[{EXTRA[library]}], from the same place as torch"
            raise ConfigError("data.transform", data.transform, f"needs {library}, which is not installed", advice)


def read_image(path: Path, data: DataConfig) -> Values:
    """Return an image file as (channels, height, width), scaled to cover height x width, its middle kept.

    Raises:
        ConfigError: a file that cannot be read, or that would be misread: wider values without data.bits, more pages
            than one without data.page, CMYK, transparency that data.channels drops.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    if data.channels not in MODES:
        return fitted(read_channels(path, data), data, str(path))
    with opened(path, data) as picture:
        if _is_wide_colour(picture, data):
            return fitted(read_tiff(path, data.page, data.channels), data, str(path))
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith("I;16"):
            if data.channels != 1:
                raise ConfigError("data.channels", data.channels, f"{path} has 1 channel of 16 bits", "use 1")
            return fitted(np.asarray(upright)[np.newaxis], data, str(path))
        if data.bits not in (None, 8):
            raise ConfigError("data.bits", data.bits, f"{path} has values of 8 bits", "leave it out")
        wanted = MODES[data.channels]
        turned = upright if upright.mode == wanted else upright.convert(wanted)
        tile = ImageOps.fit(turned, (data.width_px, data.height_px), Resampling.BILINEAR)
    return np.asarray(tile).reshape(data.height_px, data.width_px, data.channels).transpose(2, 0, 1)


def read_channels(path: Path, data: DataConfig) -> Values:
    """Return a TIFF file as (channels, height, width), of any number of channels.

    Raises:
        ConfigError: another kind of file, or as `read_tiff`.
    """
    if path.suffix.lower() not in TIFF_SUFFIXES:
        advice = "use TIFF files, or 1 (grey), 3 (colour) or 4 (with alpha)"
        raise ConfigError("data.channels", data.channels, f"{path} is no TIFF file", advice)
    return read_tiff(path, data.page, data.channels)


@contextmanager
def opened(path: Path, data: DataConfig, is_mask: bool = False, verify: bool = False) -> Iterator[Picture]:
    """Open an image file at its page; to `verify` is to look at checksums only.

    Raises:
        ConfigError: it cannot be read, or would be misread.
    """
    import PIL.Image

    # Pillow guards web services against huge uploads; here huge images are the point, and the user's own.
    PIL.Image.MAX_IMAGE_PIXELS = None
    try:
        with PIL.Image.open(path) as picture:
            if verify:
                picture.verify()
            else:
                _check_picture(picture, path, data, is_mask)
            yield picture
    except ConfigError:
        raise
    except Exception as error:
        if path.suffix.lower() in TIFF_SUFFIXES and not is_mask:
            read_tiff(path, data.page, data.channels)  # which says what Pillow does not: another number of channels
        why = " ".join(str(error).split()) or type(error).__name__
        advice = "repair or remove the file"
        raise ConfigError("data.path", path, f"not a readable image: {why}", advice) from error


def _check_picture(picture: Picture, path: Path, data: DataConfig, is_mask: bool) -> None:
    pages = getattr(picture, "n_frames", 1)
    if data.page is None and pages > 1:
        raise ConfigError("data.page", "null", f"{path} has {pages} pages", f"set data.page=0 to {pages - 1}")
    if data.page is not None:
        if data.page >= pages:
            raise ConfigError("data.page", data.page, f"{path} has {pages} pages", "count from 0")
        picture.seek(data.page)
    if is_mask:
        return
    if picture.mode in ("I", "F"):
        advice = "use 8 or 16 bits a channel"
        raise ConfigError(
            "data.path", path, f"not a readable image: its mode {picture.mode} has no known range; {advice}"
        )
    if picture.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        advice = "convert it to RGB by its colour profile"
        raise ConfigError("data.path", path, f"has colours of mode {picture.mode}, which would be misread", advice)
    bits = _bits_of(picture)
    if bits > 8 and not picture.mode.startswith("I;16") and not _is_wide_colour(picture, data):
        text = f"has {bits} bits a channel in colour, which would be cut to 8"
        raise ConfigError("data.path", path, text, "convert it to 8 bits, or to a TIFF file and set data.bits")
    if bits > 8 and data.bits is None:
        raise ConfigError(
            "data.bits", "null", f"{path} has values of {bits} bits", "set data.bits=16, or 12 if so many"
        )
    if data.channels == 1 and picture.mode == "P":
        raise ConfigError("data.channels", 1, f"{path} has a palette of colours", "set data.channels=3")
    has_alpha = picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info
    if has_alpha and data.channels != 4 and not _is_opaque(picture):
        text = f"{path} is transparent in places, which {data.channels} channels would drop"
        raise ConfigError("data.channels", data.channels, text, "set data.channels=4, or flatten the file")


def _is_wide_colour(picture: Picture, data: DataConfig) -> bool:
    """Return whether a file is a TIFF of colours that Pillow would cut to 8 bits and data.bits wants whole."""
    wide = picture.format == "TIFF" and not picture.mode.startswith("I;16") and _bits_of(picture) > 8
    return wide and data.bits not in (None, 8)


def _is_opaque(picture: Picture) -> bool:
    extrema: Any = (picture if picture.mode in ("RGBA", "LA") else picture.convert("RGBA")).getextrema()
    return bool(extrema[-1] == (255, 255))


def _bits_of(picture: Picture) -> int:
    """Return the bits of a channel in the file, which Pillow cuts to 8 for colours."""
    if picture.mode.startswith("I;16"):
        return 16
    tags: Any = getattr(picture, "tag_v2", None)
    if tags is not None:
        return int(np.max(tags.get(258, 8)))
    tiles: Any = getattr(picture, "tile", ())
    raw = [str(tile[3]) for tile in tiles]
    return 16 if picture.format == "PNG" and any(";16" in mode for mode in raw) else 8


def fitted(values: Values, data: DataConfig, name: str, is_mask: bool = False) -> Values:
    """Return (channels, height, width) values scaled to cover the configured sides, their middle kept.

    Raises:
        ConfigError: other channels than data.channels, or values beyond data.bits.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling, fromarray

    _, height, width = values.shape
    if not is_mask:
        checked(values, data, name)
    if (height, width) == (data.height_px, data.width_px):
        return values
    size, how = (data.width_px, data.height_px), Resampling.NEAREST if is_mask else Resampling.BILINEAR
    exact = np.uint8 if values.dtype == np.uint8 else np.float32
    made = np.empty((len(values), data.height_px, data.width_px), dtype=values.dtype)
    for channel in range(len(values)):
        picture = fromarray(np.ascontiguousarray(values[channel], dtype=exact))
        resized = np.asarray(ImageOps.fit(picture, size, how))
        made[channel] = np.rint(resized) if np.issubdtype(values.dtype, np.integer) else resized
    return made


def checked(values: Values, data: DataConfig, name: str) -> Values:
    """Return (channels, height, width) values.

    Raises:
        ConfigError: other channels than data.channels, or values beyond data.bits.
    """
    if len(values) != data.channels:
        raise ConfigError(
            "data.channels", data.channels, f"{name} has {len(values)}", f"set data.channels={len(values)}"
        )
    if values.dtype == np.uint16 and data.bits is None:
        raise ConfigError("data.bits", "null", f"{name} has values of 16 bits", "set data.bits=16, or 12 if so many")
    if values.dtype == np.uint16 and int(values.max()) > range_of(values.dtype, data.bits):
        raise ConfigError("data.bits", data.bits, f"{name} has the value {values.max()}", "set data.bits=16")
    return values


def range_of(dtype: Any, bits: int | None) -> float:
    """Return the largest value of images: of bytes, of data.bits, or 1 of floats."""
    if dtype == np.uint8:
        return _BYTE
    return 1.0 if np.issubdtype(dtype, np.floating) else 2.0 ** (bits or 16) - 1


def load_transform(data: DataConfig) -> Callable[..., Any]:
    """Return what data.transform names: a class or a factory is called with the keyword arguments.

    A factory is a function that takes no more than these; another function is the transform, and gets them too.
    """
    key, target = "data.transform", str(data.transform)
    found = load_target(key, target)
    if not isinstance(found, type):
        try:
            inspect.signature(found).bind(**data.transform_kwargs)
        except (TypeError, ValueError):
            return partial(found, **data.transform_kwargs)
    made: Callable[..., Any] = call_target(key, target, data.transform_kwargs, None)
    return made


def is_of_albumentations(transform: Any) -> bool:
    """Return whether a transform takes and gives arrays by name."""
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
    return np.asarray(found["image"]).transpose(2, 0, 1), np.asarray(found["mask"]) if mask is not None else None


def _by_torch(transform: Any, values: Values, mask: NDArray[Any] | None) -> tuple[Values, NDArray[Any] | None]:
    torch, wrap = sys.modules["torch"], sys.modules.get("torchvision.tv_tensors")
    tensors = [torch.from_numpy(np.array(each)) for each in (values, mask) if each is not None]
    if wrap is not None:
        tensors = [kind(tensor) for kind, tensor in zip((wrap.Image, wrap.Mask), tensors, strict=False)]
    found = transform(*tensors)
    arrays = [each.numpy() for each in (found if isinstance(found, tuple | list) else (found,))]
    return arrays[0], arrays[1] if mask is not None else None


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads that decode images; what has not begun is cancelled at an error."""
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def ordered(pool: ThreadPoolExecutor, function: Any, number: int) -> Iterator[Any]:
    """Yield function(0) to function(number - 1) in order, a few of them at a time."""
    indices = iter(range(number))
    running = [pool.submit(function, index) for index in islice(indices, 2 * _MAX_THREADS)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(function, index) for index in islice(indices, 1)]


def stamps(paths: Sequence[Path]) -> str:
    """Return names, sizes and times of files."""
    return repr([(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths])

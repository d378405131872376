"""Pyramids of whole-slide images.

They have levels, microns per pixel, and regions that openslide or tiffslide reads in bands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from math import ceil, floor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.data.dataset import Box
from gems.data.images import stamps
from gems.errors import ConfigError
from gems.utils.cache import cached

# the first one that is installed is used
LIBRARIES = ("openslide", "tiffslide")
# relative difference of scales below which a level is read without resampling
SAME_SCALE = 0.01
_WHITE = 255
_THUMBNAIL_PX = 1024
_MIN_SATURATION = 8.0
_TILE_PX = 256
_MAX_TILE_PX = 1024
_MAX_OPEN = 8
_CACHE_BYTES = 8 * 2**20

Bytes = NDArray[np.uint8]  # (height, width, 3)
# from a corner (x, y) and a size (width, height), both at one level
Reader = Callable[[tuple[int, int], tuple[int, int]], Bytes]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a slide's pyramid.

    `downsample` is the number of level-0 pixels per side of one of its pixels.
    """

    width_px: int
    height_px: int
    downsample: float
    tile_px: int


@dataclass(frozen=True, slots=True)
class Slide:
    """The metadata of a slide's file, without its pixels."""

    path: Path
    levels: tuple[Level, ...]
    mpp: float | None


class Handles:
    """The slides that this process has open: the last few that it read, by one thread at a time.

    A copy in another process starts with no open slides.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._process = os.getpid()
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Handles], tuple[()]]:
        """Return a constructor for a copy without open slides."""
        return Handles, ()

    def __len__(self) -> int:
        """Return the number of open slides."""
        return len(self._open)

    def __del__(self) -> None:
        """Close the slides of this process."""
        if self._process == os.getpid():
            with suppress(Exception):  # objects of the library may already be gone
                self.close()

    @contextmanager
    def opened(self, path: Path) -> Iterator[Any]:
        """Yield an open slide; no other thread reads in the meantime.

        If more than _MAX_OPEN slides are open, the least recently used one is closed.
        """
        with self._lock:
            # file handles cannot be shared with a forked process
            if self._process != os.getpid():
                self._open, self._process = {}, os.getpid()
            self._open[path] = self._open.pop(path, None) or open_slide(path)
            while len(self._open) > _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            yield self._open[path]

    def close(self) -> None:
        """Close all slides."""
        while self._open:
            self._open.popitem()[1].close()


def library() -> Any:
    """Return the module that reads slides: openslide, or else tiffslide.

    Raises:
        ConfigError: Neither is installed.
    """
    for name in LIBRARIES:
        try:
            return import_module(name)
        except (ImportError, OSError):  # OSError: openslide without its C library
            continue
    advice = "pip install gems-train[slide], or gems-train[tiffslide], which is pure Python"
    raise ConfigError(
        "data.name", "slide", f"needs {' or '.join(LIBRARIES)}, and neither is installed", advice
    )


def open_slide(path: Path) -> Any:
    """Open a slide with the installed library.

    Raises:
        ConfigError: The slide cannot be read.
    """
    module = library()
    try:
        if module.__name__ == "tiffslide":
            return module.TiffSlide(path)
        handle = module.OpenSlide(path)
        # the default cache takes 32 MiB, and reading in bands needs none
        if int(module.__library_version__.split(".")[0]) >= 4:
            handle.set_cache(module.OpenSlideCache(_CACHE_BYTES))
        return handle
    except Exception as error:
        raise _unreadable(path, error) from error


def read_facts(path: Path) -> Slide:
    """Return the metadata of a slide's file, which is cached until the file changes.

    Raises:
        ConfigError: The slide cannot be read.
    """

    def make() -> dict[str, Any]:
        handle = open_slide(path)
        prefix = type(handle).__module__.partition(".")[0]
        properties = handle.properties
        levels = []
        for number, (width, height) in enumerate(handle.level_dimensions):
            tile_px = int(properties.get(f"{prefix}.level[{number}].tile-height") or _TILE_PX)
            levels.append(
                asdict(Level(width, height, float(handle.level_downsamples[number]), tile_px))
            )
        mpp = [properties.get(f"{prefix}.mpp-{axis}") for axis in "xy"]
        handle.close()
        return {
            "levels": levels,
            "mpp": float(np.mean([float(each) for each in mpp])) if all(mpp) else None,
        }

    facts = cached(None, "slide", repr((library().__name__, stamps([path]))), make)
    return Slide(path, tuple(Level(**each) for each in facts["levels"]), facts["mpp"])


def read_bands(
    handle: Any,
    slide: Slide,
    corner: tuple[int, int],
    downsample: float,
    shape_px: tuple[int, ...],
    box: Box | None = None,
) -> Iterator[tuple[slice, Bytes]]:
    """Yield the rows and pixels of each band of a region, or of a part of it, from top to bottom.

    They are read from the coarsest level that is not coarser than `downsample`. If its scale
    differs, they are resampled (bilinear, smoothed); bands are then those of the whole region, in
    all columns, so that a part has the same pixels. Pixels beyond the slide are white.

    Args:
        handle: The open slide.
        slide: The metadata of its file.
        corner: x and y of the region's upper left corner, at level 0.
        downsample: The number of level-0 pixels per side of a pixel of the region.
        shape_px: Height and width of the region.
        box: The part; None for the whole region.

    Raises:
        ConfigError: The file cannot be read there.
    """
    height, width = shape_px
    box = box or Box(slice(0, height), slice(0, width))
    fine = [
        n for n, each in enumerate(slide.levels) if each.downsample <= downsample * (1 + SAME_SCALE)
    ]
    number = max(fine, key=lambda n: slide.levels[n].downsample, default=0)
    level = slide.levels[number]
    ratio = downsample / level.downsample
    left, top = (side / level.downsample for side in corner)
    tile_px = min(level.tile_px, _MAX_TILE_PX)
    read = partial(_read, handle, slide, number)
    if abs(ratio - 1) < SAME_SCALE:
        # pixels may depend on where a read begins, so all reads begin as for the whole region
        is_whole = not level.downsample.is_integer()
        part = Box(slice(0, height), slice(0, width)) if is_whole else box
        bands = _stored_bands(read, (round(left), round(top)), part, box.rows, tile_px)
        first_px = part.columns.start
    else:
        bands = _resampled_bands(read, level, (left, top), ratio, shape_px, box.rows, tile_px)
        first_px = 0
    columns = slice(box.columns.start - first_px, box.columns.stop - first_px)
    for first, band in bands:
        begin = max(first, box.rows.start)
        end = min(first + len(band), box.rows.stop)
        yield slice(begin, end), band[begin - first : end - first, columns]


def _stored_bands(
    read: Reader, corner: tuple[int, int], part: Box, rows: slice, tile_px: int
) -> Iterator[tuple[int, Bytes]]:
    """Yield the first row and the pixels of each band of `part` that has some of the `rows`.

    Bands end at the file's own tiles, so that no tile is decoded twice.
    """
    column, row = corner
    start, stop = part.rows.start, part.rows.stop
    width = part.columns.stop - part.columns.start
    begins = [start, *range(start + tile_px - (row + start) % tile_px, stop, tile_px), stop]
    for first, end in pairwise(begins):
        if first < rows.stop and end > rows.start:
            yield first, read((column + part.columns.start, row + first), (width, end - first))


def _resampled_bands(
    read: Reader,
    level: Level,
    corner: tuple[float, float],
    ratio: float,
    shape_px: tuple[int, ...],
    rows: slice,
    tile_px: int,
) -> Iterator[tuple[int, Bytes]]:
    """Yield the first row and the pixels of each band with some of the `rows`, in all columns."""
    from PIL.Image import Resampling, fromarray

    height, width = shape_px
    left, top = corner
    # pixels around a band that its own pixels depend on
    margin = ceil(ratio) + 1
    right = left + width * ratio
    bottom = top + height * ratio
    # beyond the slide only if the region is
    first_column = max(floor(left) - margin, min(0, floor(left)))
    end_column = min(ceil(right) + margin, max(level.width_px, ceil(right)))
    rows_px = max(1, int(tile_px / ratio))
    for first in range(rows.start // rows_px * rows_px, rows.stop, rows_px):
        end = min(first + rows_px, height)
        upper = top + first * ratio
        lower = top + end * ratio
        first_row = max(floor(upper) - margin, min(0, floor(top)))
        end_row = min(ceil(lower) + margin, max(level.height_px, ceil(bottom)))
        size = end_column - first_column, end_row - first_row
        source = fromarray(np.ascontiguousarray(read((first_column, first_row), size)))
        sides = (left - first_column, upper - first_row, right - first_column, lower - first_row)
        resized = source.resize((width, end - first), Resampling.BILINEAR, box=sides)
        yield first, np.asarray(resized)


def thumbnail(slide: Slide) -> tuple[Bytes, float]:
    """Return a slide with at most 1024 pixels per side, and its scale.

    The scale is the number of level-0 pixels per side of a pixel of the thumbnail.
    """
    whole = slide.levels[0]
    scale = max(1.0, max(whole.width_px, whole.height_px) / _THUMBNAIL_PX)
    shape_px = max(1, int(whole.height_px / scale)), max(1, int(whole.width_px / scale))
    handles = Handles()
    with handles.opened(slide.path) as handle:
        bands = [band for _, band in read_bands(handle, slide, (0, 0), scale, shape_px)]
    return np.concatenate(bands), scale


def tissue_mask(slide: Slide) -> tuple[NDArray[np.bool_], float]:
    """Return the tissue mask of a thumbnail, and its scale as in `thumbnail`.

    Tissue is more saturated than Otsu's threshold, and than CLAM's threshold of 8 out of 255.
    """
    from skimage.filters import threshold_otsu

    otsu: Any = threshold_otsu
    pixels, scale = thumbnail(slide)
    saturation = _saturation(pixels)
    return saturation > max(_MIN_SATURATION, float(otsu(saturation))), scale


def _read(
    handle: Any, slide: Slide, number: int, corner: tuple[int, int], size: tuple[int, int]
) -> Bytes:
    """Return the pixels of a level at `corner` (x, y at that level), of `size` (width, height).

    Pixels beyond the level are white.
    """
    level = slide.levels[number]
    begin = [max(0, side) for side in corner]
    end = [
        min(side + length, most)
        for side, length, most in zip(corner, size, (level.width_px, level.height_px), strict=True)
    ]
    inside = end[0] - begin[0], end[1] - begin[1]
    pixels = np.empty((0, 0, 3), dtype=np.uint8)
    if min(inside) > 0:
        location = round(begin[0] * level.downsample), round(begin[1] * level.downsample)
        try:
            pixels = np.asarray(handle.read_region(location, number, inside))
        except Exception as error:
            raise _unreadable(slide.path, error) from error
        pixels = _opaque(pixels)
        if inside == size:
            return pixels
    canvas = np.full((size[1], size[0], 3), _WHITE, dtype=np.uint8)
    if pixels.size:
        row = begin[1] - corner[1]
        column = begin[0] - corner[0]
        canvas[row : row + inside[1], column : column + inside[0]] = pixels
    return canvas


def _opaque(pixels: Bytes) -> Bytes:
    """Return colours without alpha, blended over white if alpha is below 255.

    The scanner saw nothing at such pixels.
    """
    if pixels.shape[2] == 3 or int(pixels[:, :, 3].min()) == _WHITE:
        return pixels[:, :, :3]
    alpha = pixels[:, :, 3:].astype(np.float32) / _WHITE
    return np.rint(pixels[:, :, :3] * alpha + _WHITE * (1 - alpha)).astype(np.uint8)


def _saturation(pixels: Bytes) -> NDArray[np.uint8]:
    """Return the HSV saturation of colours, in bytes."""
    most = pixels.max(axis=2).astype(np.float32)
    least = pixels.min(axis=2).astype(np.float32)
    saturation: NDArray[np.uint8] = np.rint(_WHITE * (most - least) / np.maximum(most, 1)).astype(
        np.uint8
    )
    return saturation


def _unreadable(path: Path, error: Exception) -> ConfigError:
    why = " ".join(str(error).split()) or type(error).__name__
    return ConfigError("data.path", path, f"no readable slide: {why}", "repair or remove the file")

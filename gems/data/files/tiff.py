"""TIFF files with any width of values and number of channels, which Pillow would cut or refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.data.files.formats import readable
from gems.errors import ConfigError

# values of the tags PhotometricInterpretation and PlanarConfiguration
_GREY = (0, 1)
_RGB = 2
_SEPARATE = 2
_UPRIGHT = 1
NODATA_TAG = 42113  # GDAL_NODATA
# None, LZW, Deflate (two numbers), PackBits and Zstandard: all decoders return the same values.
_LOSSLESS = (1, 5, 8, 32946, 32773, 50000)
# with fewer segments, reading rows saves too little memory
_LEAST_SEGMENTS = 4

Part = tuple[slice, slice]  # rows and columns


def part_type(path: Path, page: int | None, channels: int, sides_px: tuple[int, int]) -> Any:
    """Return the type of a page's values if parts of it can be read with much less memory.

    Otherwise return None. Such a page has the requested sides, and its values are stored
    uncompressed in the file, or in many tiles or strips.
    """
    import tifffile

    with suppress(Exception), _pages(path) as pages:  # reading the whole image reports the error
        chosen = pages[page or 0]
        _check(chosen, path, channels)
        if (chosen.imagelength, chosen.imagewidth) != sides_px or (page is None and len(pages) > 1):
            return None
        codecs: Any = tifffile.TIFF.DECOMPRESSORS
        has_small_segments = (
            chosen.compression in _LOSSLESS
            and chosen.compression in codecs
            and _segment_px(chosen)[0] * _LEAST_SEGMENTS <= chosen.imagelength
        )
        return chosen.dtype if chosen.is_memmappable or has_small_segments else None
    return None


def read_tiff(
    path: Path, page: int | None, channels: int, part: Part | None = None
) -> NDArray[Any]:
    """Return a page or a part of it as (channels, height, width), in the file's own type.

    No further copy is made.

    Raises:
        ConfigError: The file cannot be read; it has several pages and `page` is None; the number of
            channels differs; or values, colours or an orientation would be misread.
    """
    import tifffile

    with _pages(path) as pages:
        if page is None and len(pages) > 1:
            text = f"{path} has {len(pages)} pages"
            raise ConfigError("data.page", "null", text, f"set data.page=0 to {len(pages) - 1}")
        if page is not None and page >= len(pages):
            raise ConfigError("data.page", page, f"{path} has {len(pages)} pages", "count from 0")
        chosen = pages[page or 0]
        _check(chosen, path, channels)
        if chosen.compression not in tifffile.TIFF.DECOMPRESSORS:
            text = f"is compressed by {_name(chosen.compression)}, which no installed library reads"
            advice = "pip install imagecodecs, or save it by Deflate"
            raise ConfigError("data.path", path, text, advice)
        values = chosen.asarray() if part is None else _read_part(chosen, *part)
    if values.ndim == 2:
        return np.asarray(values[np.newaxis])
    return np.asarray(values if chosen.planarconfig == _SEPARATE else values.transpose(2, 0, 1))


def sides_of(path: Path, page: int | None) -> tuple[int, int]:
    """Return the (width, height) of a page.

    Raises:
        ConfigError: The page cannot be read.
    """
    with _pages(path) as pages:
        chosen = pages[page or 0]
        return int(chosen.imagewidth), int(chosen.imagelength)


def type_of(path: Path, page: int | None) -> Any:
    """Return the type of a page's values.

    Raises:
        ConfigError: The page cannot be read.
    """
    with _pages(path) as pages:
        return pages[page or 0].dtype


def tag_of(path: Path, page: int | None, number: int) -> Any:
    """Return the value of a page's tag, or None if it has no such tag or cannot be read."""
    with suppress(Exception), _pages(path) as pages:
        return pages[page or 0].tags[number].value
    return None


@contextmanager
def _pages(path: Path) -> Iterator[Any]:
    import tifffile

    with readable(path), tifffile.TiffFile(path) as file:
        yield file.pages


def _name(code: Any) -> str:
    return str(getattr(code, "name", code))


def _segment_px(page: Any) -> tuple[int, int]:
    """Return the height and width of a tile or strip."""
    if page.is_tiled:
        return page.tilelength, page.tilewidth
    return min(page.rowsperstrip, page.imagelength), page.imagewidth


def _read_part(page: Any, rows: slice, columns: slice) -> NDArray[Any]:
    """Return rows and columns of a page, with the axes of the whole page."""
    file = page.parent.filehandle
    is_separate = page.samplesperpixel > 1 and page.planarconfig == _SEPARATE
    if page.is_memmappable:
        order = page.parent.byteorder
        values = np.memmap(
            file.path, page.dtype.newbyteorder(order), "r", page.dataoffsets[0], page.shape
        )
        return np.array(
            values[:, rows, columns] if is_separate else values[rows, columns], dtype=page.dtype
        )
    height, width = _segment_px(page)
    down = ceil(page.imagelength / height)
    across = ceil(page.imagewidth / width)
    planes = page.samplesperpixel if is_separate else 1
    sides = rows.stop - rows.start, columns.stop - columns.start
    part = np.zeros((planes, *sides, page.samplesperpixel // planes), dtype=page.dtype)
    of_rows = range(rows.start // height, ceil(rows.stop / height))
    of_columns = range(columns.start // width, ceil(columns.stop / width))
    for plane, row, column in product(range(planes), of_rows, of_columns):
        index = (plane * down + row) * across + column
        # the writer of the file left the segment out: all values are 0
        if not page.databytecounts[index]:
            continue
        file.seek(page.dataoffsets[index])
        segment = page.decode(file.read(page.databytecounts[index]), index)[0]
        top = row * height
        left = column * width
        upper = max(top, rows.start)
        lower = min(top + height, rows.stop)
        first = max(left, columns.start)
        end = min(left + width, columns.stop)
        part[
            plane,
            upper - rows.start : lower - rows.start,
            first - columns.start : end - columns.start,
        ] = segment[0, upper - top : lower - top, first - left : end - left]
    if is_separate:
        return part[..., 0]
    return part[0] if page.samplesperpixel > 1 else part[0, ..., 0]


def _check(page: Any, path: Path, channels: int) -> None:
    if page.samplesperpixel != channels:
        text = f"{path} has {page.samplesperpixel}"
        raise ConfigError(
            "data.channels", channels, text, f"set data.channels={page.samplesperpixel}"
        )
    if page.imagedepth != 1:
        raise ConfigError("data.path", path, "has a page of several planes", "save each as a page")
    if page.photometric not in (*_GREY, _RGB):
        text = f"has colours of kind {_name(page.photometric)}, which would be misread"
        raise ConfigError("data.path", path, text, "convert it to RGB by its colour profile")
    if page.photometric == _GREY[0]:
        raise ConfigError(
            "data.path", path, "counts from white (MINISWHITE)", "save it with 0 as black"
        )
    if page.dtype not in (np.uint8, np.uint16) and not np.issubdtype(page.dtype, np.floating):
        text = f"has values of type {page.dtype}, which has no known range"
        raise ConfigError("data.path", path, text, "use uint8, uint16 or float32")
    orientation = page.tags.get("Orientation")
    if orientation is not None and orientation.value != _UPRIGHT:
        raise ConfigError(
            "data.path",
            path,
            f"is turned (orientation {int(orientation.value)})",
            "save it upright",
        )

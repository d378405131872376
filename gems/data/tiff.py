"""TIFF files of any width of values and number of channels, which Pillow would cut or refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.errors import ConfigError

_GREY, _RGB, _SEPARATE = (0, 1), 2, 2  # tags PhotometricInterpretation and PlanarConfiguration
_UPRIGHT = 1


def read_tiff(path: Path, page: int | None, channels: int) -> NDArray[Any]:
    """Return a page as (channels, height, width), of the file's own type, without a copy of its values.

    Raises:
        ConfigError: a file that cannot be read, pages without a `page` said, another number of channels, or values,
            colours or an orientation that would be misread.
    """
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            pages: Any = file.pages
            if page is None and len(pages) > 1:
                text = f"{path} has {len(pages)} pages"
                raise ConfigError("data.page", "null", text, f"set data.page=0 to {len(pages) - 1}")
            if page is not None and page >= len(pages):
                raise ConfigError("data.page", page, f"{path} has {len(pages)} pages", "count from 0")
            chosen = pages[page or 0]
            _check(chosen, path, channels)
            values = chosen.asarray()
    except ConfigError:
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        text = f"not a readable image: {why}"
        raise ConfigError("data.path", path, text, "repair or remove the file") from error
    if values.ndim == 2:
        return np.asarray(values[np.newaxis])
    return np.asarray(values if chosen.planarconfig == _SEPARATE else values.transpose(2, 0, 1))


def _check(page: Any, path: Path, channels: int) -> None:
    if page.samplesperpixel != channels:
        text = f"{path} has {page.samplesperpixel}"
        raise ConfigError("data.channels", channels, text, f"set data.channels={page.samplesperpixel}")
    if page.imagedepth != 1:
        raise ConfigError("data.path", path, "has a page of several planes", "save each as a page")
    if page.photometric not in (*_GREY, _RGB):
        text = f"has colours of kind {getattr(page.photometric, 'name', page.photometric)}, which would be misread"
        raise ConfigError("data.path", path, text, "convert it to RGB by its colour profile")
    if page.photometric == _GREY[0]:
        raise ConfigError("data.path", path, "counts from white (MINISWHITE)", "save it with 0 as black")
    if page.dtype not in (np.uint8, np.uint16, np.float32):
        text = f"has values of type {page.dtype}, which has no known range"
        raise ConfigError("data.path", path, text, "use uint8, uint16 or float32")
    orientation = page.tags.get("Orientation")
    if orientation is not None and orientation.value != _UPRIGHT:
        raise ConfigError("data.path", path, f"is turned (orientation {int(orientation.value)})", "save it upright")

"""Read image files and masks.

Pillow reads them; tifffile reads the TIFF files that Pillow would cut to 8 bits or cannot decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.data.dataset import NO_LABEL
from gems.data.files.formats import is_tiff, readable
from gems.data.files.tiff import NODATA_TAG, Part, part_type, read_tiff, sides_of, tag_of, type_of
from gems.data.files.values import Values, as_nodata, checked, fitted, have_one_shape
from gems.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
TIFF_SUFFIXES = (".tif", ".tiff")
_MASK_MODES = ("1", "L", "P", "I", "I;16", "I;16B")
_ORIENTATION = 274  # EXIF tag
_UPRIGHT = 1
_LAST_UNSWAPPED = 4
_STUBS = ("BUFR", "FITS", "GRIB", "HDF5")  # formats that Pillow identifies but cannot read
_NOT_DECODED = ("webp",)  # TIFF compressions that Pillow knows but its libtiff may not


def gives_parts(path: Path, data: DataConfig) -> bool:
    """Return whether `read_tiff` can read parts of a file with less memory than the whole.

    The parts equal those of the image that `read_image` returns.
    """
    # the fourth channel may be an alpha channel
    if path.suffix.lower() not in TIFF_SUFFIXES or data.channels == max(MODES):
        return False
    dtype = part_type(path, data.page, data.channels, (data.height_px, data.width_px))
    if dtype is None or data.channels not in MODES:
        return dtype is not None
    return bool(
        dtype.kind == "f" or dtype == (np.uint16 if data.bits not in (None, 8) else np.uint8)
    )


def is_of_bytes(path: Path, data: DataConfig) -> bool:
    """Return whether `read_image` returns bytes, by the file's header."""
    if data.bits not in (None, 8):
        return False
    # reading the image reports the error
    with suppress(Exception), _opened_image(path, data, is_checked=False) as picture:
        if picture is not None:
            return not picture.mode.startswith("I;16")
        return bool(type_of(path, data.page) == np.uint8)
    return False


def read_image(path: Path, data: DataConfig, nodata: float | None = None) -> Values:
    """Read an image file as (channels, height, width), scaled to cover height x width and cropped.

    The middle of the image is kept.

    Raises:
        ConfigError: The file cannot be read, or would be misread: values of more than 8 bits
            without data.bits, more than one page without data.page, CMYK, or transparency that
            data.channels drops.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    name = str(path)
    with _opened_image(path, data) as picture:
        if picture is None:
            return fitted(read_tiff(path, data.page, data.channels), data, name, nodata)
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith("I;16"):
            if data.channels != 1:
                raise ConfigError(
                    "data.channels", data.channels, f"{path} has 1 channel of 16 bits", "use 1"
                )
            return fitted(np.asarray(upright)[np.newaxis], data, name, nodata)
        if data.bits not in (None, 8):
            raise ConfigError(
                "data.bits", data.bits, f"{path} has values of 8 bits", "leave it out"
            )
        wanted = MODES[data.channels]
        tile = upright if upright.mode == wanted else upright.convert(wanted)
        if nodata is None:
            tile = ImageOps.fit(tile, (data.width_px, data.height_px), Resampling.BILINEAR)
    values = np.asarray(tile).reshape(tile.height, tile.width, data.channels).transpose(2, 0, 1)
    return values if nodata is None else fitted(values, data, name, nodata)


def read_mask(path: Path, data: DataConfig, image: Path) -> NDArray[Any]:
    """Read the numbers in a mask file, of shape (height, width).

    Pixels with the file's nodata value become NO_LABEL, unless this value is a class number. The
    mask is turned like its image and fitted as in `read_image`, with the nearest pixel.

    Raises:
        ConfigError: The file cannot be read, has colours, or has another shape than its image.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    with readable(path), _open(path) as picture:
        _go_to_page(picture, path, data)
        upright = _as_its_image(picture, path, data, image)
        if upright.mode not in _MASK_MODES:
            text = (
                f"{path} has {'floats' if upright.mode == 'F' else 'colours'} (mode {upright.mode})"
            )
            raise ConfigError(
                "data.path", path, text, "a mask holds the number of each pixel's class"
            )
        tile = ImageOps.fit(upright, (data.width_px, data.height_px), Resampling.NEAREST)
        mask = np.asarray(tile).astype(np.int64)
        if picture.format == "JPEG" and (count := len(np.unique(mask))) > data.num_classes:
            text = f"has {count} values, as compression to JPEG changes the numbers of a mask"
            raise ConfigError("data.path", path, text, "make the masks again, as PNG")
        return _without_nodata(mask, _nodata_of(picture), data)


def gives_mask_parts(path: Path, data: DataConfig) -> bool:
    """Return whether `read_mask_part` can read parts of a mask with less memory than the whole."""
    if path.suffix.lower() not in TIFF_SUFFIXES:
        return False
    dtype = part_type(path, data.page, 1, (data.height_px, data.width_px))
    return dtype is not None and bool(dtype.kind == "u")


def read_mask_part(path: Path, data: DataConfig, part: Part) -> NDArray[Any]:
    """Read a part, rows and columns, of the mask that `read_mask` returns, for such files."""
    values = read_tiff(path, data.page, 1, part)[0].astype(np.int64)
    return _without_nodata(values, as_nodata(tag_of(path, data.page, NODATA_TAG)), data)


def _without_nodata(mask: NDArray[Any], nodata: float | None, data: DataConfig) -> NDArray[Any]:
    """Return a mask with NO_LABEL for the file's nodata value, unless this is a class number."""
    if (
        nodata is not None
        and f"{nodata:g}" not in data.class_map
        and nodata not in range(data.num_classes)
    ):
        mask[mask == nodata] = NO_LABEL
    return mask


def read_nodata(path: Path, data: DataConfig) -> float | None:
    """Return the nodata value of an image, or None if it has none.

    The value comes from data.nodata, or else from the tag of a TIFF file.
    """
    from PIL import Image

    if data.nodata is not None:
        return as_nodata(data.nodata)
    if not is_tiff(path):
        return None
    try:
        with Image.open(path) as picture:
            picture.seek(data.page or 0)
            return _nodata_of(picture)
    except Exception:  # a file that only tifffile can read
        return as_nodata(tag_of(path, data.page, NODATA_TAG))


def check_header(path: Path, data: DataConfig) -> None:
    """Raise ConfigError if a file's header says that it cannot be read or would be misread."""
    with _opened_image(path, data):
        pass


def read_through(path: Path, data: DataConfig, nodata: float | None = None) -> None:
    """Read a whole file.

    Raises:
        ConfigError: The file cannot be read, or would be misread.
    """
    with _opened_image(path, data) as picture:
        if picture is None:
            checked(read_tiff(path, data.page, data.channels), data, str(path), nodata)
            return
        is_wide = picture.mode.startswith("I;16")
        has_checksums = picture.format == "PNG" and data.page is None and not is_wide
        if is_wide:
            checked(np.asarray(picture)[np.newaxis], data, str(path), nodata)
        elif not has_checksums:
            # Other formats have no checksums, so Pillow's verify() would accept a truncated file.
            picture.draft("L", (1, 1))
            picture.load()
    if has_checksums:
        with readable(path), _open(path) as picture:
            picture.verify()


@contextmanager
def _opened_image(
    path: Path, data: DataConfig, is_checked: bool = True
) -> Iterator[Picture | None]:
    """Open an image file at its page.

    Yield None if tifffile must read it, because Pillow would cut or cannot decode it.

    Raises:
        ConfigError: The file cannot be read, or would be misread.
    """
    with readable(path):
        picture = _for_pillow(path, data)
        if picture is None:
            yield None
            return
        with picture:
            _go_to_page(picture, path, data)
            if is_checked:
                _check_picture(picture, path, data)
            yield picture


def _for_pillow(path: Path, data: DataConfig) -> Picture | None:
    if data.channels not in MODES:
        if path.suffix.lower() not in TIFF_SUFFIXES:
            advice = "use TIFF files, or 1 (grey), 3 (colour) or 4 (with alpha)"
            raise ConfigError("data.channels", data.channels, f"{path} is no TIFF file", advice)
        return None
    if not is_tiff(path):
        return _open(path)
    try:
        picture = _open(path)
        picture.seek(data.page or 0)
    except EOFError:  # no such page, after which the pages cannot be counted
        picture.close()
        return _open(path)
    except Exception:
        return None
    is_cut = _is_wide_colour(picture, data) or picture.mode == "F"
    if is_cut or picture.info.get("compression") in _NOT_DECODED:
        picture.close()
        return None
    return picture


def _open(path: Path) -> Picture:
    import PIL.Image

    # Pillow's limit protects web services from huge uploads; here huge images are intended, and
    # they are the user's own.
    PIL.Image.MAX_IMAGE_PIXELS = None
    return PIL.Image.open(path)


def _as_its_image(mask: Picture, path: Path, data: DataConfig, image: Path) -> Picture:
    """Return a mask turned like its image.

    The mask is turned by its own orientation, or by the orientation of the image if that fits.

    Raises:
        ConfigError: The mask has another shape than its image.
    """
    from PIL import ImageOps

    size, orientation = _geometry(image, data)
    upright = size if orientation <= _LAST_UNSWAPPED else size[::-1]
    tags = mask.getexif()
    if tags.get(_ORIENTATION, _UPRIGHT) == _UPRIGHT and have_one_shape(mask.size, size):
        tags[_ORIENTATION] = orientation
    turned = ImageOps.exif_transpose(mask)
    if not have_one_shape(turned.size, upright):
        text = "has {} x {} px, and its image {} has {} x {}".format(*turned.size, image, *upright)
        raise ConfigError("data.path", path, text, "give both one size")
    return turned


def _geometry(path: Path, data: DataConfig) -> tuple[tuple[int, int], int]:
    """Return the stored (width, height) of an image, and its orientation."""
    with _opened_image(path, data, is_checked=False) as picture:
        if picture is None:
            return sides_of(path, data.page), _UPRIGHT
        return picture.size, int(picture.getexif().get(_ORIENTATION, _UPRIGHT))


def _nodata_of(picture: Picture) -> float | None:
    tags: Any = getattr(picture, "tag_v2", {})
    return as_nodata(tags.get(NODATA_TAG))


def _go_to_page(picture: Picture, path: Path, data: DataConfig) -> None:
    pages = getattr(picture, "n_frames", 1)
    if data.page is None and pages > 1:
        raise ConfigError(
            "data.page", "null", f"{path} has {pages} pages", f"set data.page=0 to {pages - 1}"
        )
    if data.page is not None:
        if data.page >= pages:
            raise ConfigError("data.page", data.page, f"{path} has {pages} pages", "count from 0")
        picture.seek(data.page)


def _check_picture(picture: Picture, path: Path, data: DataConfig) -> None:
    if picture.format in _STUBS:
        raise OSError(f"no reader of {picture.format}")
    if picture.mode in ("I", "F"):
        advice = "use 8 or 16 bits a channel, or a TIFF file of float32"
        raise ConfigError(
            "data.path",
            path,
            f"not a readable image: its mode {picture.mode} has no known range; {advice}",
        )
    if picture.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        advice = "convert it to RGB by its colour profile"
        raise ConfigError(
            "data.path", path, f"has colours of mode {picture.mode}, which would be misread", advice
        )
    bits = _bits_of(picture)
    if bits > 8 and not picture.mode.startswith("I;16") and not _is_wide_colour(picture, data):
        text = f"has {bits} bits a channel in colour, which would be cut to 8"
        raise ConfigError(
            "data.path", path, text, "convert it to 8 bits, or to a TIFF file and set data.bits"
        )
    if bits > 8 and data.bits is None:
        raise ConfigError(
            "data.bits",
            "null",
            f"{path} has values of {bits} bits",
            "set data.bits=16, or 12 if so many",
        )
    if data.channels == 1 and picture.mode == "P":
        raise ConfigError(
            "data.channels", 1, f"{path} has a palette of colours", "set data.channels=3"
        )
    has_alpha = picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info
    if has_alpha and data.channels != 4 and not _is_opaque(picture):
        text = f"{path} is transparent in places, which {data.channels} channels would drop"
        raise ConfigError(
            "data.channels", data.channels, text, "set data.channels=4, or flatten the file"
        )


def _is_wide_colour(picture: Picture, data: DataConfig) -> bool:
    """Return whether data.bits asks for a colour TIFF in full, which Pillow would cut to 8 bits."""
    wide = (
        picture.format == "TIFF" and not picture.mode.startswith("I;16") and _bits_of(picture) > 8
    )
    return wide and data.bits not in (None, 8)


def _is_opaque(picture: Picture) -> bool:
    extrema: Any = (
        picture if picture.mode in ("RGBA", "LA") else picture.convert("RGBA")
    ).getextrema()
    return bool(extrema[-1] == (255, 255))


def _bits_of(picture: Picture) -> int:
    """Return the bits per channel in the file; Pillow cuts colours to 8."""
    if picture.mode.startswith("I;16"):
        return 16
    tags: Any = getattr(picture, "tag_v2", None)
    if tags is not None:
        return int(np.max(tags.get(258, 8)))
    tiles: Any = getattr(picture, "tile", ())
    raw = [str(tile[3]) for tile in tiles]
    return 16 if picture.format == "PNG" and any(";16" in mode for mode in raw) else 8

"""Values of images as stored in files: their range, nodata values, and resizing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.errors import ConfigError

Values = NDArray[Any]  # (channels, height, width), in the file's own type

_BYTE = 255.0
# tolerance for floats from 0 to 1, which resampling and rounding may exceed
_SLACK = 1e-3
# ratio of two sizes of the same shape from which the smaller may have been rounded
_LEAST_SCALE = 1.5
# about the largest float32; texts contain only some of its digits
_LARGEST = 3.4e38


def range_of(dtype: Any, bits: int | None) -> float:
    """Return the largest value of images: 255 for bytes, 1 for floats, or that of data.bits."""
    if dtype == np.uint8:
        return _BYTE
    return 1.0 if np.issubdtype(dtype, np.floating) else 2.0 ** (bits or 16) - 1


def as_nodata(value: Any) -> float | None:
    """Return the number in data.nodata, a tag or an attribute, or None if it is not a number."""
    try:
        return float(np.asarray(value).ravel()[0])
    except (IndexError, TypeError, ValueError):
        return None


def is_nodata(values: NDArray[Any], nodata: float) -> NDArray[np.bool_]:
    """Return a mask of the values that equal the nodata value."""
    if math.isnan(nodata):
        return np.asarray(np.isnan(values))
    if abs(nodata) >= _LARGEST and np.issubdtype(values.dtype, np.floating):
        return np.asarray(values <= -_LARGEST if nodata < 0 else values >= _LARGEST)
    return np.asarray(values == nodata)


def checked(
    values: Values, data: DataConfig, name: str, nodata: float | None = None, first_row: int = 0
) -> Values:
    """Return the values of an image, or of its rows from `first_row` on, after checking them.

    Raises:
        ConfigError: The number of channels is not data.channels, values exceed data.bits, floats
            are not finite, or floats are outside 0 to 1 and the normalisation requires that range.
    """
    if len(values) != data.channels:
        raise ConfigError(
            "data.channels",
            data.channels,
            f"{name} has {len(values)}",
            f"set data.channels={len(values)}",
        )
    is_whole = values.dtype.kind == "u"  # in either byte order
    if is_whole and values.dtype.itemsize == 2 and data.bits is None:
        raise ConfigError(
            "data.bits",
            "null",
            f"{name} has values of 16 bits",
            "set data.bits=16, or 12 if so many",
        )
    if values.dtype == np.uint8 or not values.size:
        return values
    known = values if nodata is None else values[~is_nodata(values, nodata)]
    low, high = (known.min(), known.max()) if known.size else (0, 0)
    if is_whole:
        if high > range_of(values.dtype, data.bits):
            raise ConfigError(
                "data.bits", data.bits, f"{name} has the value {high}", "set data.bits=16"
            )
        return values
    if not (np.isfinite(low) and np.isfinite(high)):
        raise _not_finite(values, name, nodata, first_row)
    is_scaled = data.normalization != "computed" and data.mean is None and data.std is None
    if is_scaled and (low < -_SLACK or high > 1 + _SLACK):
        text = f"takes floats from 0 to 1, and {name} has values from {low:g} to {high:g}"
        advice = (
            "set data.normalization=computed, or data.mean and data.std; of volumes data.window"
        )
        raise ConfigError("data.normalization", data.normalization, text, advice)
    return values


def have_one_shape(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return whether two sizes (width, height) are equal up to scale.

    A scaled side may have been rounded to whole pixels.
    """
    (width, height), (other_width, other_height) = sorted((first, second))
    error = abs(width * other_height - height * other_width)
    return error == 0 or (
        other_width >= _LEAST_SCALE * width and error < max(other_width, other_height)
    )


def _not_finite(values: Values, name: str, nodata: float | None, first_row: int) -> ConfigError:
    wrong = ~np.isfinite(values)
    if nodata is not None:
        wrong &= ~is_nodata(values, nodata)
    place = list(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
    value = values[tuple(place)]
    place[1] += first_row
    named = ("plane", "row", "column")[-len(place) + 1 :]
    where = ", ".join(f"{name} {at}" for name, at in zip(named, place[1:], strict=True))
    first = f"the first ({value}) in {where}"
    advice = "repair or remove it, or set data.nodata=nan if such pixels hold no data"
    return ConfigError(
        "data.path", name, f"has {wrong.sum()} values that are not finite, {first}", advice
    )


def fitted(
    values: Values, data: DataConfig, name: str, nodata: float | None = None, is_mask: bool = False
) -> Values:
    """Return values (channels, height, width) scaled to cover the configured sides.

    The middle is kept. A value that would be mixed with a nodata value becomes a nodata value too.

    Raises:
        ConfigError: As in `checked`.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling, fromarray

    _, height, width = values.shape
    if not is_mask:
        checked(values, data, name, nodata)
    if (height, width) == (data.height_px, data.width_px):
        return values
    size = (data.width_px, data.height_px)
    how = Resampling.NEAREST if is_mask else Resampling.BILINEAR
    exact = np.uint8 if values.dtype == np.uint8 else np.float32
    fitted = np.empty((len(values), data.height_px, data.width_px), dtype=values.dtype)

    def resized(plane: NDArray[Any], dtype: Any) -> NDArray[Any]:
        return np.asarray(
            ImageOps.fit(fromarray(np.ascontiguousarray(plane, dtype=dtype)), size, how)
        )

    for channel, plane in enumerate(values):
        gaps = None if nodata is None else is_nodata(plane, nodata)
        plane_fitted = resized(plane if gaps is None else np.where(gaps, 0, plane), exact)
        fitted[channel] = (
            np.rint(plane_fitted) if np.issubdtype(values.dtype, np.integer) else plane_fitted
        )
        if gaps is not None and gaps.any():
            fitted[channel][resized(gaps, np.float32) > 0] = nodata
    return fitted

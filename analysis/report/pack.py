"""Packing: columns of numbers as texts, small enough for a page with a million events."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

LEVEL = 3
# Types of JavaScript's typed arrays, narrow before wide.
TYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "f8")


def packed(values: np.ndarray, *, is_sum: bool = False) -> dict[str, Any]:
    """Return a column as `{type, count, is_sum, data}`, in the narrowest type that holds it.

    `data` is base64 of the deflated bytes, first those of all values, then the second ones and so on: alike bytes stand
    together and take no room. With `is_sum` differences are stored, from 0 on, which are small where values grow.

    Raises:
        ValueError: whole numbers that are not exact in a double.
    """
    stored = np.diff(values, prepend=values.dtype.type(0)) if is_sum else values
    kind = _narrowest(stored)
    if kind == "f8" and stored.dtype.kind in "iu" and len(stored) and int(np.abs(values).max()) > 1 << 53:
        raise ValueError("whole numbers beyond 2^53 are not exact in JavaScript")
    little = np.ascontiguousarray(stored.astype(f"<{kind}"))
    planes = little.view(np.uint8).reshape(len(little), little.itemsize).T
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), LEVEL)).decode()
    return {"type": kind, "count": len(little), "is_sum": is_sum, "data": data}


def _narrowest(values: np.ndarray) -> str:
    if values.dtype.kind not in "iub":
        return "f8"
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    return next((kind for kind in TYPES[:-1] if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max), "f8")

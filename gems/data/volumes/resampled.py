"""Bring stored volumes to one spacing and to the sides of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gems.data.dataset import Box
from gems.data.files.values import Values
from gems.data.volumes.stored import StoredVolume

_SLACK = 1e-3  # by which spacings count as equal


def resampled(stored: StoredVolume, spacing: Sequence[float] | None, order: int) -> StoredVolume:
    """Return a volume at the spacing of a sample's axes; one that has it is returned as it is.

    Args:
        stored: The volume.
        spacing: The distances along the axes of the sample; None for those of the file.
        order: 1 interpolates linearly, 0 takes the nearest voxel.
    """
    if spacing is None or np.allclose(stored.spacing_of_sample, spacing, rtol=_SLACK):
        return stored
    factors = np.divide(stored.spacing_of_sample, spacing)
    sides = tuple(max(1, round(side * by)) for side, by in zip(stored.shape, factors, strict=True))

    def read(spans: Sequence[slice]) -> Values:
        from scipy.ndimage import zoom

        whole = stored.part(stored.whole)
        by = (1, *np.divide(sides, stored.shape))
        dtype = np.float32 if order else whole.dtype
        zoomed: Values = zoom(
            whole.astype(dtype, copy=False), by, order=order, mode="nearest", grid_mode=True
        )
        return zoomed[:, *spans]

    axes = tuple((axis, False) for axis in range(len(sides)))
    return replace(
        stored, sides=sides, read=read, gives_parts=False, spacing=tuple(spacing), axes=axes
    )


def middle(stored: StoredVolume, sides: Sequence[int], box: Box, fill: int) -> Values:
    """Return a part of the middle of a volume, which has `sides`.

    What is beyond the volume is `fill`.
    """
    spans = []
    inside = []
    for span, side, length in zip(box, sides, stored.shape, strict=True):
        first = (length - side) // 2
        wanted = slice(span.start + first, span.stop + first)
        spans.append(wanted)
        inside.append(slice(min(max(wanted.start, 0), length), max(min(wanted.stop, length), 0)))
    inside = [slice(each.start, max(each.start, each.stop)) for each in inside]
    values = stored.part(Box(*inside))
    if inside == spans:
        return values
    padded = np.full((len(values), *(span.stop - span.start for span in spans)), fill, values.dtype)
    place = (
        slice(each.start - span.start, each.stop - span.start)
        for each, span in zip(inside, spans, strict=True)
    )
    padded[:, *place] = values
    return padded

"""Maps of classes in tiled TIFF files that are written part by part."""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.streaming.block_plan import Box, along_all
from gems.utils.atomic_io import atomic_write

TILE_PX = 256  # TIFF requires a multiple of 16
_MAX_BYTE_CLASSES = 256
Tile = tuple[int, ...]  # the place of a tile along each axis; a plane of a volume has its own tiles


@dataclass(slots=True)
class _Open:
    """A tile and the number of its pixels that are still missing."""

    classes: NDArray[Any]
    missing: int


class MapFile:
    """The classes of an image's pixels (H, W), or of a volume's (D, H, W) as a page for each plane.

    Parts may come in any order, each pixel once. A tile is held until it has all its pixels; then it
    waits, compressed, in a temporary file, because tifffile writes tiles in their own order.
    """

    def __init__(self, path: Path, sides: Sequence[int], num_classes: int) -> None:
        self._path = path
        self._sides = tuple(sides)
        self._dtype = np.uint8 if num_classes <= _MAX_BYTE_CLASSES else np.uint16
        self._tile = (*(1 for _ in self._sides[:-2]), TILE_PX, TILE_PX)
        self._open: dict[Tile, _Open] = {}
        self._spans: dict[Tile, tuple[int, int]] = {}  # in the temporary file
        path.parent.mkdir(parents=True, exist_ok=True)
        # closed by `write`; beside the map, because other folders may be in memory
        self._spool = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
        self._missing = math.prod(self._sides)
        self.counts = np.zeros(num_classes, dtype=np.int64)  # of the pixels of each class

    @property
    def is_complete(self) -> bool:
        """Whether all pixels have been added."""
        return not self._missing

    def add(self, classes: NDArray[np.int64], box: Box) -> None:
        """Add the classes of a part, which a box has along all axes or the first ones."""
        spans = along_all(box, self._sides)
        self.counts += np.bincount(classes.ravel(), minlength=len(self.counts))
        self._missing -= classes.size
        touched = (
            range(begin // px, -(-end // px))
            for (begin, end), px in zip(spans, self._tile, strict=True)
        )
        for place in product(*touched):
            self._add_to(place, classes, spans)

    def write(self) -> None:
        """Write the file of a complete map."""
        import tifffile

        with self._spool, atomic_write(self._path) as partial:
            tifffile.imwrite(
                partial,
                self._compressed(),
                shape=self._sides,
                dtype=self._dtype,
                photometric="minisblack",
                tile=(TILE_PX, TILE_PX),
                compression="zlib",
                metadata=None,
            )

    def _add_to(self, place: Tile, classes: NDArray[np.int64], spans: Box) -> None:
        corner = [at * px for at, px in zip(place, self._tile, strict=True)]
        inside = [
            (max(begin, first), min(end, first + px))
            for (begin, end), first, px in zip(spans, corner, self._tile, strict=True)
        ]
        if place not in self._open:
            sizes = (
                min(px, side - first)
                for px, side, first in zip(self._tile, self._sides, corner, strict=True)
            )
            self._open[place] = _Open(np.zeros(self._tile, self._dtype), math.prod(sizes))
        tile = self._open[place]
        of_tile = _slices(inside, corner)
        tile.classes[of_tile] = classes[_slices(inside, [begin for begin, _ in spans])]
        tile.missing -= tile.classes[of_tile].size
        if not tile.missing:
            packed = zlib.compress(self._open.pop(place).classes.tobytes())
            self._spans[place] = self._spool.tell(), len(packed)
            self._spool.write(packed)

    def _compressed(self) -> Iterator[bytes]:
        for place in sorted(self._spans):
            start, length = self._spans[place]
            self._spool.seek(start)
            yield self._spool.read(length)


def _slices(spans: Box | list[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - first, end - first) for (begin, end), first in zip(spans, origin, strict=True)
    )

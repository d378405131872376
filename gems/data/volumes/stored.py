"""A stored volume: an array that is read in parts, turned to the nearest axes of the patient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.data.dataset import Box
from gems.data.files.values import Values
from gems.errors import ConfigError

DIRECTIONS = {"L": (0, -1), "R": (0, 1), "P": (1, -1), "A": (1, 1), "I": (2, -1), "S": (2, 1)}


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """A volume as it is in a file.

    Attributes:
        sides: Its size along each axis, in the order of the file.
        channels: The number of values of a voxel.
        read: Returns a part, of shape (channels, *sides of the part), by a range along each axis.
        gives_parts: Whether `read` needs memory for the part only.
        spacing: The distance of voxels along each axis, in mm or the file's own unit.
        axes: For each axis of the sample, the axis of the file and whether it runs backwards.
        orientation: The directions of the sample's axes, last axis first, as in RAS.
    """

    sides: tuple[int, ...]
    channels: int
    read: Callable[[Sequence[slice]], Values]
    gives_parts: bool
    spacing: tuple[float, ...]
    axes: tuple[tuple[int, bool], ...]
    orientation: str = "as stored"

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of the sample."""
        return tuple(self.sides[axis] for axis, _ in self.axes)

    @property
    def whole(self) -> Box:
        """The part that is all of the sample."""
        return Box(*(slice(0, side) for side in self.shape))

    @property
    def spacing_of_sample(self) -> tuple[float, ...]:
        """The distance of voxels along each axis of the sample."""
        return tuple(self.spacing[axis] for axis, _ in self.axes)

    def part(self, box: Box) -> Values:
        """Return a part of the sample, of shape (channels, *sides of the part)."""
        spans = list(box)
        for (axis, is_back), span in zip(self.axes, box, strict=True):
            side = self.sides[axis]
            spans[axis] = slice(side - span.stop, side - span.start) if is_back else span
        values = self.read(spans).transpose(0, *(1 + axis for axis, _ in self.axes))
        return np.flip(values, tuple(d for d, (_, is_back) in enumerate(self.axes, 1) if is_back))


def turned_axes(directions: NDArray[Any], orientation: str | None) -> tuple[tuple[int, bool], ...]:
    """Return the axes of a sample that is turned to the nearest directions of the patient.

    Args:
        directions: The direction of each stored axis as a column, in RAS.
        orientation: The wanted directions of columns, rows and depth; None: as they are stored.
    """
    if orientation is None:
        return ((2, False), (1, False), (0, False))
    unit = directions / np.linalg.norm(directions, axis=0)
    # stored axis of each axis of the patient
    nearest = max(
        permutations(range(3)), key=lambda order: sum(abs(unit[w, s]) for w, s in enumerate(order))
    )
    wanted = [DIRECTIONS[letter] for letter in reversed(orientation)]
    return tuple(
        (nearest[world], bool(unit[world, nearest[world]] * sign < 0)) for world, sign in wanted
    )


def needs(library: str, path: Path, extra: str = "volume") -> ConfigError:
    """Return the error of a library that is not installed."""
    text = f"{path} is read by {library}, which is not installed"
    return ConfigError("data.path", path, text, f"pip install gems-train[{extra}]")

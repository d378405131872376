"""Plan the blocks of a map that is cut along several axes, from a plan of each axis.

Blocks run in raster order, the last axis fastest. Which outputs are ready depends on each axis by
itself, so a block of a value is the product of its parts. What a block keeps goes to the next block
along some axis: along the first axis a band of the new columns, along a later one a band over all
rows that the tensor of the block has. Each tensor of a value in a block has a path: for each axis
the carried piece it is, or `FRESH`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from gems.streaming.axis_plan import FRESH, AxisPlan, AxisValue, Readers
from gems.streaming.axis_rules import Span

Box = tuple[Span, ...]  # a span for each axis
Path = tuple[int, ...]
Index = tuple[int, ...]
K = TypeVar("K")
V = TypeVar("V")
MAX_KNOWN_BLOCKS = 256  # a plan of thousands of blocks would take much memory


class Place(NamedTuple):
    """A box of a value, and the tensor that holds it."""

    path: Path
    box: Box


class Kept(NamedTuple):
    """A box that is kept for the next block along `axis`, where it is the tensor of `path`."""

    axis: int
    place: Place
    path: Path


@dataclass(slots=True)
class BlockValue:
    """A value in one block.

    Attributes:
        new: The box that is made in this block, empty if any of its spans is.
        fresh: The box of the tensor that it is written to; what is outside the map is zeros.
        carried: The boxes that were kept by earlier blocks.
        copied: The parts of these that are written beside the new box.
        kept: The boxes that are kept for later blocks.
        window: The box of other values that is read to make the new one.
        taken: The boxes with this window, for each value that is read.
    """

    new: Box
    fresh: Box
    window: Box
    carried: dict[Path, Box] = field(default_factory=dict)
    copied: list[Place] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    taken: list[tuple[Place, ...]] = field(default_factory=list)

    def moved(self, size: Sequence[int]) -> Hashable:
        """Return what is equal for values with equal shapes, of a map of some size.

        Positions are counted from the new box, and in windows from the window's start.
        """
        start = [begin for begin, _ in self.new]
        window = [begin for begin, _ in self.window]
        return (
            _less(self.new, start),
            _less(self.fresh, start),
            tuple(
                (ahead[0] < 0, new[1] == end, fresh[0] < 0)
                for ahead, new, fresh, end in zip(
                    self.window, self.new, self.fresh, size, strict=True
                )
            ),
            tuple((path, _less(box, start)) for path, box in self.carried.items()),
            tuple((place.path, _less(place.box, start)) for place in self.copied),
            tuple((kept.axis, kept.path, _less(kept.place.box, start)) for kept in self.kept),
            _less(self.window, window),
            tuple(
                tuple((each.path, _less(each.box, window)) for each in parts)
                for parts in self.taken
            ),
        )


class ByBlock(Generic[K, V]):
    """What is known of each of the latest blocks; that of the oldest is forgotten."""

    def __init__(self) -> None:
        self._known: dict[int, dict[K, V]] = {}

    def of(self, block: int) -> dict[K, V]:
        """Return what is known of a block, to be added to."""
        known = self._known.get(block)
        if known is None:
            if len(self._known) == MAX_KNOWN_BLOCKS:
                del self._known[next(iter(self._known))]
            known = self._known[block] = {}
        return known


class BlockPlan:
    """The plan of all values in all blocks.

    `values` has each value along each axis; `grid` is the number of parts of each axis.
    """

    def __init__(self, values: Sequence[Sequence[AxisValue]], grid: Sequence[int]) -> None:
        self.grid = tuple(grid)
        self.num_blocks = math.prod(grid)
        self.axes = tuple(
            AxisPlan([value[axis] for value in values], parts) for axis, parts in enumerate(grid)
        )
        self._reads = [value[0].reads for value in values]
        readers: list[set[int]] = [set() for _ in values]
        for number, reads in enumerate(self._reads):
            for read in reads:
                readers[read].add(number)
        self._all_readers = [frozenset(each) for each in readers]
        self._readers: dict[tuple[int, Index, Path], Readers] = {}
        self._found: ByBlock[int, BlockValue] = ByBlock()
        self.whole: Path = (FRESH,) * len(grid)

    def index(self, block: int) -> Index:
        """Return the part of each axis in a block."""
        return index_of(block, self.grid)

    def step(self, axis: int) -> int:
        """Return how many blocks later the next part of an axis comes."""
        return math.prod(self.grid[axis + 1 :])

    def at(self, block: int, number: int) -> BlockValue:
        """Return the plan of a value in a block."""
        found = self._found.of(block)
        if number not in found:
            found[number] = self._value(self.index(block), number)
        return found[number]

    def sizes(self, number: int) -> tuple[int, ...]:
        """Return the sizes of the whole map of a value."""
        return tuple(axis.values[number].size for axis in self.axes)

    def boxes(self, number: int) -> Iterator[Box]:
        """Yield the new box of a value in each block."""
        for block in range(self.num_blocks):
            yield self._new(self.index(block), number)

    def shapes_of(self, block: int) -> Hashable:
        """Return a key that is equal for blocks with the same shapes.

        Such blocks have the same numbers of rows and columns, in the same positions relative to one
        another and to the edges of the map.
        """
        return tuple(
            self.at(block, number).moved(self.sizes(number)) for number in range(len(self._reads))
        )

    def _new(self, index: Index, number: int) -> Box:
        return tuple(axis.new(number, part) for axis, part in zip(self.axes, index, strict=True))

    def _value(self, index: Index, number: int) -> BlockValue:
        window = tuple(
            axis.window(number, part) for axis, part in zip(self.axes, index, strict=True)
        )
        found = BlockValue(self._new(index, number), (), window)
        self._add(found, index, number, (), ())
        found.taken = [
            tuple(self._taken(index, number, read, (), ())) for read in self._reads[number]
        ]
        return found

    def _add(self, found: BlockValue, index: Index, number: int, path: Path, box: Box) -> None:
        """Add what a value has along an axis, given its sources and spans along those before."""
        axis = len(path)
        if axis == len(self.axes):
            if path == self.whole:
                found.fresh = box
            return
        readers = self._readers_of(index, number, path)
        part = self.axes[axis].track(number, readers)[index[axis]]
        inner = found.new[axis + 1 :]
        rest = self.whole[axis + 1 :]
        for source, span in enumerate(part.carried):
            carried = (*box, span, *inner)
            if not is_empty(carried):
                found.carried[*path, source, *rest] = carried
            if rest and self._readers_of(index, number, (*path, source)):
                self._add(found, index, number, (*path, source), (*box, span))
        for place, piece in enumerate(part.kept):
            kept = (*box, (piece.begin, piece.end), *inner)
            if not is_empty(kept):
                found.kept.append(
                    Kept(axis, Place((*path, piece.source, *rest), kept), (*path, place, *rest))
                )
        if path == self.whole[:axis]:
            for piece in part.copied:
                copied = (*box, (piece.begin, piece.end), *inner)
                if not is_empty(copied):
                    found.copied.append(Place((*path, piece.source, *rest), copied))
        self._add(found, index, number, (*path, FRESH), (*box, part.fresh))

    def _taken(
        self, index: Index, reader: int, number: int, path: Path, box: Box
    ) -> Iterator[Place]:
        """Yield the boxes of a value that a reader takes."""
        axis = len(path)
        if axis == len(self.axes):
            yield Place(path, box)
            return
        part = self.axes[axis].track(number, self._readers_of(index, number, path))[index[axis]]
        for piece in self.axes[axis].taken(reader, number, index[axis], part):
            yield from self._taken(
                index, reader, number, (*path, piece.source), (*box, (piece.begin, piece.end))
            )

    def _readers_of(self, index: Index, number: int, path: Path) -> Readers:
        """Return the readers that take some of the sources of a path, in the parts of its axes."""
        if not path:
            return self._all_readers[number]
        axis = len(path) - 1
        key = number, index[: axis + 1], path
        if key not in self._readers:
            outer = self._readers_of(index, number, path[:-1])
            plan, place = self.axes[axis], index[axis]
            part = plan.track(number, outer)[place]
            self._readers[key] = frozenset(
                reader
                for reader in outer
                if any(
                    piece.source == path[-1] for piece in plan.taken(reader, number, place, part)
                )
            )
        return self._readers[key]


def index_of(block: int, grid: Sequence[int]) -> Index:
    """Return the part of each axis in a block of a grid."""
    found = []
    for parts in reversed(grid):
        block, part = divmod(block, parts)
        found.append(part)
    return tuple(reversed(found))


def is_empty(box: Box) -> bool:
    """Return whether a box has nothing."""
    return any(begin >= end for begin, end in box)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the extents of a box."""
    return tuple(end - begin for begin, end in box)


def offsets(box: Box, start: Box) -> tuple[int, ...]:
    """Return where a box begins in another."""
    return tuple(begin - first for (begin, _), (first, _) in zip(box, start, strict=True))


def _less(box: Box, start: Sequence[int]) -> Box:
    return tuple(
        (begin - first, end - first) for (begin, end), first in zip(box, start, strict=True)
    )

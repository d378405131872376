"""Plan the blocks of a map that is cut along several axes, from a plan of each axis.

Blocks run in raster order, the last axis fastest. Which outputs are ready depends on each axis by
itself, so a block of a value is the product of its parts. What a block keeps goes to the next block
along some axis: along the first axis a band of the new columns, along a later one a band over all
rows that the tensor of the block has. Each tensor of a value in a block has a path: for each axis
the carried piece it is, or `FRESH`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import product
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
        self._all_readers = [frozenset(numbers) for numbers in readers]
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
        values = self._found.of(block)
        if number not in values:
            values[number] = self._value(self.index(block), number)
        return values[number]

    def sizes(self, number: int) -> tuple[int, ...]:
        """Return the sizes of the whole map of a value."""
        return tuple(axis.values[number].size for axis in self.axes)

    def positions(self, number: int) -> Iterator[int]:
        """Yield how many positions of a value are new in each block."""
        extents = [
            [end - begin for begin, end in (axis.new(number, part) for part in range(parts))]
            for axis, parts in zip(self.axes, self.grid, strict=True)
        ]
        return map(math.prod, product(*extents))

    @cached_property
    def kinds(self) -> tuple[tuple[bytes, ...], ...]:
        """A digest of each part of each axis, equal for parts in which values have equal shapes.

        What a block has along an axis follows from its part of that axis and from the readers that
        earlier axes leave, so blocks of equal parts have equal shapes.
        """
        tracks = dict.fromkeys(enumerate(self._all_readers))
        kinds = []
        for axis in self.axes:
            shapes = (repr(axis.shapes_of(part, tracks)) for part in range(axis.num_parts))
            kinds.append(
                tuple(blake2b(shape.encode(), digest_size=16).digest() for shape in shapes)
            )
            tracks = dict.fromkeys(
                (number, some)
                for number, readers in tracks
                for some in axis.readers_by_source(number, readers)
            )
        return tuple(kinds)

    def _new(self, index: Index, number: int) -> Box:
        return tuple(axis.new(number, part) for axis, part in zip(self.axes, index, strict=True))

    def _value(self, index: Index, number: int) -> BlockValue:
        window = tuple(
            axis.window(number, part) for axis, part in zip(self.axes, index, strict=True)
        )
        value = BlockValue(self._new(index, number), (), window)
        self._add(value, index, number, (), ())
        value.taken = [
            tuple(self._taken(index, number, read, (), ())) for read in self._reads[number]
        ]
        return value

    def _add(self, value: BlockValue, index: Index, number: int, path: Path, box: Box) -> None:
        """Add what a value has along an axis, given its sources and spans along those before."""
        axis = len(path)
        if axis == len(self.axes):
            if path == self.whole:
                value.fresh = box
            return
        readers = self._readers_of(index, number, path)
        part = self.axes[axis].track(number, readers)[index[axis]]
        inner = value.new[axis + 1 :]
        rest = self.whole[axis + 1 :]
        for source, span in enumerate(part.carried):
            carried = (*box, span, *inner)
            if not is_empty(carried):
                value.carried[*path, source, *rest] = carried
            if rest and self._readers_of(index, number, (*path, source)):
                self._add(value, index, number, (*path, source), (*box, span))
        for place, piece in enumerate(part.kept):
            kept_box = (*box, (piece.begin, piece.end), *inner)
            if not is_empty(kept_box):
                value.kept.append(
                    Kept(axis, Place((*path, piece.source, *rest), kept_box), (*path, place, *rest))
                )
        if path == self.whole[:axis]:
            for piece in part.copied:
                copied = (*box, (piece.begin, piece.end), *inner)
                if not is_empty(copied):
                    value.copied.append(Place((*path, piece.source, *rest), copied))
        self._add(value, index, number, (*path, FRESH), (*box, part.fresh))

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
    index = []
    for parts in reversed(grid):
        block, part = divmod(block, parts)
        index.append(part)
    return tuple(reversed(index))


def is_empty(box: Box) -> bool:
    """Return whether a box has nothing."""
    return any(begin >= end for begin, end in box)


def along_all(box: Box, sides: Sequence[int]) -> Box:
    """Return a box along all axes from one along the first axes, or all."""
    return (*box, *((0, side) for side in sides[len(box) :]))


def sizes(box: Box) -> tuple[int, ...]:
    """Return the extents of a box."""
    return tuple(end - begin for begin, end in box)


def offsets(box: Box, start: Box) -> tuple[int, ...]:
    """Return where a box begins in another."""
    return tuple(begin - first for (begin, _), (first, _) in zip(box, start, strict=True))

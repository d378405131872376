"""Plan the parts of all values of a network along one axis of the map.

The text speaks of rows; depth and columns are planned alike. A value is a feature map that comes in
parts. The plan says which rows of it are made in a part, which rows its readers take, and which are
kept for later parts (the carry): the rows that some reader still needs, in one piece or several
(rows of a long skip are kept as they came, without a copy). In a part, a value has one fresh piece:
its new rows; before them, the rows of the carry that a windowed reader wants in one tensor with
them; and rows of zeros, if that reader pads the map. So rows are copied only for the overlap of
kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gems.streaming.axis_rules import Bins, Rule, Span

FRESH = -1
Readers = frozenset[int]


@dataclass(frozen=True, slots=True)
class AxisValue:
    """A value along the axis, and how it is made.

    An input of the network has the `ends` of its parts. Any other value names the values that it
    `reads`. Without a rule it reads them row for row. With a rule it reads one value: as sums over
    new rows (`is_summed`), or as a window. Rows of the window outside the map are zeros
    (`has_zeros`) or absent. What it reads must be in one tensor if it `is_windowed` along any axis.
    A value that `is_late` is made in the last part. Other values wait until `together` parts are
    there, and take these at once.
    """

    size: int
    ends: tuple[int, ...] = ()
    rule: Rule | None = None
    reads: tuple[int, ...] = ()
    is_windowed: bool = False
    is_summed: bool = False
    has_zeros: bool = False
    is_late: bool = False
    together: int = 1


class Piece(NamedTuple):
    """Rows of a value, in the carried piece `source` or in the fresh one."""

    source: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """A value in one part.

    Attributes:
        new: The rows that are made in this part.
        fresh: The rows of the tensor that they are written to; rows outside the map are zeros.
        carried: The pieces that were kept in the part before.
        copied: The parts of these pieces that are written in front of the new rows.
        kept: The pieces that are kept for the next part.
    """

    new: Span
    fresh: Span
    carried: tuple[Span, ...]
    copied: tuple[Piece, ...]
    kept: tuple[Piece, ...]


class AxisPlan:
    """The plan of all values along one axis; each value must follow those that it reads.

    Attributes:
        ends: The number of rows of each value after each part.
    """

    def __init__(self, values: Sequence[AxisValue], num_parts: int) -> None:
        self.values = tuple(values)
        self.num_parts = num_parts
        self.ends: list[tuple[int, ...]] = []
        for value in values:
            self.ends.append(value.ends or self._ends_of(value))
        self._tracks: dict[tuple[int, Readers], tuple[Part, ...]] = {}

    def new(self, number: int, part: int) -> Span:
        """Return the rows of a value that are made in a part."""
        ends = self.ends[number]
        return ends[part - 1] if part else 0, ends[part]

    def window(self, number: int, part: int) -> Span:
        """Return the rows of other values that are read to make a value's new ones.

        If these have zeros, some may be outside the map.
        """
        value = self.values[number]
        first, last = self.new(number, part)
        if value.is_summed:
            return self.new(value.reads[0], part)
        if value.rule is None or first == last:
            return first, last
        begin, end = value.rule.reads(first, last)
        if value.has_zeros:
            return begin, end
        size = self.values[value.reads[0]].size
        begin = min(max(0, begin), size - 1)
        return begin, max(begin, min(size, end))

    def track(self, number: int, readers: Readers) -> tuple[Part, ...]:
        """Return the parts of a value that only some of its readers read."""
        key = number, readers
        if key not in self._tracks:
            self._tracks[key] = self._track_of(number, readers)
        return self._tracks[key]

    def taken(self, reader: int, number: int, part: int, track_part: Part) -> tuple[Piece, ...]:
        """Return the pieces of a value that a reader takes in a part."""
        window = self.window(reader, part)
        if not self.values[reader].is_windowed:
            return _pieces(window, track_part.carried, track_part.fresh, track_part.new)
        first, last = self.new(reader, part)
        if first == last:
            return ()
        # a window that consists of absent padding only reads no rows of the piece
        return (Piece(FRESH, *(window if window[0] < window[1] else (track_part.fresh[0],) * 2)),)

    def readers_by_source(self, number: int, readers: Readers) -> Iterator[Readers]:
        """Yield the readers of each piece of a track in each part."""
        for part, track_part in enumerate(self.track(number, readers)):
            sources: dict[int, set[int]] = {FRESH: set()}
            for reader in readers:
                for piece in self.taken(reader, number, part, track_part):
                    sources.setdefault(piece.source, set()).add(reader)
            yield from map(frozenset, sources.values())

    def shapes_of(self, part: int, tracks: Collection[tuple[int, Readers]]) -> Hashable:
        """Return a key that is equal for parts with the same shapes in some tracks.

        Such parts have the same numbers of rows, in the same positions relative to one another and
        to the edges of the map.
        """
        return (
            tuple(self._value_shapes(number, part) for number in range(len(self.values))),
            tuple(self._track_shapes(number, readers, part) for number, readers in tracks),
        )

    def _value_shapes(self, number: int, part: int) -> Hashable:
        value = self.values[number]
        begin, end = self.new(number, part)
        first, last = self.window(number, part)
        sums: Span = (0, 0)  # partial ones, taken and kept
        if isinstance(value.rule, Bins) and value.is_summed:
            rows = self.new(value.reads[0], part)
            sums = value.rule.begun(rows[0]) - begin, value.rule.begun(rows[1]) - end
        return end - begin, end == value.size, last - first, first < 0, sums

    def _track_shapes(self, number: int, readers: Readers, part: int) -> Hashable:
        track_part = self.track(number, readers)[part]
        start = track_part.new[0]
        pieces = [*(Piece(FRESH, *span) for span in (track_part.fresh, *track_part.carried))]
        pieces += [*track_part.copied, *track_part.kept]
        return (
            track_part.fresh[0] < 0,
            len(track_part.carried),
            len(track_part.copied),
            tuple(_less(piece, start) for piece in pieces),
            tuple(
                tuple(
                    _less(piece, self.window(reader, part)[0])
                    for piece in self.taken(reader, number, part, track_part)
                )
                for reader in sorted(readers)
            ),
        )

    def _track_of(self, number: int, readers: Readers) -> tuple[Part, ...]:
        parts: list[Part] = []
        carried: tuple[Span, ...] = ()
        for part in range(self.num_parts):
            new = self.new(number, part)
            windows = [
                self.window(reader, part) for reader in readers if self.values[reader].is_windowed
            ]
            fresh = _span([new, *(window for window in windows if window[0] < window[1])])
            firsts = [self._next_row(reader, number, part) for reader in readers]
            kept = _pieces((min([new[1], *firsts]), new[1]), carried, fresh, new)
            copied = _overlap((max(0, fresh[0]), new[0]), carried)
            parts.append(Part(new, fresh, carried, copied, kept))
            carried = tuple((piece.begin, piece.end) for piece in kept)
        return tuple(parts)

    def _ends_of(self, value: AxisValue) -> tuple[int, ...]:
        """Return the number of rows of a value after each part."""
        ready = [min(ends) for ends in zip(*map(self.ends.__getitem__, value.reads), strict=True)]
        if value.rule is not None:
            size = self.values[value.reads[0]].size
            ready = [
                value.size if rows == size else min(value.size, value.rule.ready(rows))
                for rows in ready
            ]
        if value.is_late:
            return (*[0] * (self.num_parts - 1), value.size)
        taken = (part - (part + 1) % value.together for part in range(self.num_parts - 1))
        return (*(ready[part] if part >= 0 else 0 for part in taken), ready[-1])

    def _next_row(self, reader: int, number: int, part: int) -> int:
        """Return the first row of a value that a reader still needs after a part."""
        value = self.values[reader]
        size = self.values[number].size
        rows = self.ends[reader][part]
        if rows == value.size or value.is_summed:
            return size
        if value.rule is None:
            return rows
        return min(max(0, value.rule.reads(rows, rows + 1)[0]), size - 1)


def _less(piece: Piece, start: int) -> Piece:
    return Piece(piece.source, piece.begin - start, piece.end - start)


def _span(spans: Sequence[Span]) -> Span:
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _pieces(rows: Span, carried: Sequence[Span], fresh: Span, new: Span) -> tuple[Piece, ...]:
    """Return the pieces with the given rows, from the fresh piece if possible, else carried."""
    border = max(0, min(fresh[0], new[0]))
    fresh_rows = max(rows[0], border), rows[1]
    return (
        *_overlap((rows[0], min(rows[1], border)), carried),
        *([Piece(FRESH, *fresh_rows)] if fresh_rows[0] < fresh_rows[1] else []),
    )


def _overlap(rows: Span, carried: Sequence[Span]) -> tuple[Piece, ...]:
    spans = [(max(rows[0], begin), min(rows[1], end)) for begin, end in carried]
    return tuple(Piece(source, *span) for source, span in enumerate(spans) if span[0] < span[1])

"""Plan the rows of a network in strips.

The plan says which rows of each value are made in a strip, which rows its readers take, and which
are kept for later strips (the carry). A value is a feature map, in strips of rows. Its carry is the
rows that some reader still needs after a strip, in one piece or several (rows of a long skip are
kept as they came, without a copy). In a strip, a value has one fresh piece: its new rows; above
them, the rows of the carry that a windowed reader wants in one tensor with them; and rows of zeros,
if that reader pads the image. So rows are copied only for the overlap of kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gems.streaming.row_rules import Rule, Span

FRESH = -1


@dataclass(frozen=True, slots=True)
class RowValue:
    """A value with rows, and how it is made.

    An input of the network has the `ends` of its strips. Any other value names the values that it
    `reads`. Without a rule it reads them row for row. With a rule it reads one value: as sums over
    new rows (`is_summed`), or as a window in one tensor. Rows of the window outside the map are
    zeros (`has_zeros`) or absent. A value that `is_late` is made in the last strip. Other values
    wait until `together` strips are there, and take these at once.
    """

    height: int
    ends: tuple[int, ...] = ()
    rule: Rule | None = None
    reads: tuple[int, ...] = ()
    is_summed: bool = False
    has_zeros: bool = False
    is_late: bool = False
    together: int = 1

    @property
    def is_windowed(self) -> bool:
        """Whether the rows that the value reads must be in one tensor."""
        return self.rule is not None and not self.is_summed


class Piece(NamedTuple):
    """Rows of a value, in the carried piece `source` or in the fresh one."""

    source: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ValueStrip:
    """A value in one strip.

    Attributes:
        new: The rows that are made in this strip.
        fresh: The rows of the tensor that they are written to; rows outside the map are zeros.
        carried: The pieces that were kept in the strip before.
        copied: The parts of these pieces that are written in front of the new rows.
        kept: The pieces that are kept for the next strip.
        window: The rows of other values that are read to make the new ones; if these have zeros,
            some may be outside the map.
        taken: The pieces with these rows, for each value that is read.
    """

    new: Span
    fresh: Span
    carried: tuple[Span, ...]
    copied: tuple[Piece, ...]
    kept: tuple[Piece, ...]
    window: Span
    taken: tuple[tuple[Piece, ...], ...]

    def moved(self, rows: int) -> Hashable:
        """Return the spans shifted down by `rows`.

        The spans of the values that are read keep their positions relative to one another.
        """

        def span(each: Span) -> Span:
            return each[0] + rows, each[1] + rows

        pieces = (
            tuple(Piece(piece.source, *span((piece.begin, piece.end))) for piece in each)
            for each in (self.copied, self.kept)
        )
        first = self.window[0]
        taken = tuple(
            tuple(Piece(piece.source, piece.begin - first, piece.end - first) for piece in each)
            for each in self.taken
        )
        window = self.window[1] - first
        return (
            span(self.new),
            span(self.fresh),
            tuple(map(span, self.carried)),
            *pieces,
            window,
            taken,
        )


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The plan of all values in all strips.

    `strips[strip][value]` is a value in a strip; `ends[value][strip]` is the number of rows of a
    value after a strip.
    """

    strips: tuple[tuple[ValueStrip, ...], ...]
    ends: tuple[tuple[int, ...], ...]

    def shapes_of(self, strip: int) -> Hashable:
        """Return a key that is equal for strips with the same shapes.

        Such strips have the same numbers of rows, in the same positions relative to one another and
        to the edges of the map.
        """
        return tuple(
            (
                each.moved(-each.new[0]),
                each.window[0] < 0,
                each.new[1] == ends[-1],
                each.fresh[0] < 0,
            )
            for each, ends in zip(self.strips[strip], self.ends, strict=True)
        )


def plan_rows(values: Sequence[RowValue], num_strips: int) -> RowPlan:
    """Plan the rows of all values in all strips; each value must follow those that it reads."""
    ends: list[tuple[int, ...]] = []
    readers: list[list[int]] = [[] for _ in values]
    for number, value in enumerate(values):
        ends.append(value.ends or _ends_of(value, values, ends, num_strips))
        for read in value.reads:
            readers[read].append(number)
    carried: list[tuple[Span, ...]] = [()] * len(values)
    strips = []
    for strip in range(num_strips):
        news = [(each[strip - 1] if strip else 0, each[strip]) for each in ends]
        windows = [_window(value, values, news, number) for number, value in enumerate(values)]
        fresh = []
        kept = []
        for number, value in enumerate(values):
            wanted = [windows[reader] for reader in readers[number] if values[reader].is_windowed]
            fresh.append(
                _span([news[number], *(window for window in wanted if window[0] < window[1])])
            )
            firsts = [
                _next_row(values[reader], value.height, ends[reader][strip])
                for reader in readers[number]
            ]
            rows = min([news[number][1], *firsts]), news[number][1]
            kept.append(_pieces(rows, carried[number], fresh[number], news[number]))
        strips.append(
            tuple(
                ValueStrip(
                    new=news[number],
                    fresh=fresh[number],
                    carried=carried[number],
                    copied=_overlap((max(0, fresh[number][0]), news[number][0]), carried[number]),
                    kept=kept[number],
                    window=windows[number],
                    taken=tuple(
                        (
                            _pieces(windows[number], carried[read], fresh[read], news[read])
                            if not value.is_windowed
                            else (_window_piece(windows[number], fresh[read]),)
                            * (news[number][0] < news[number][1])
                        )
                        for read in value.reads
                    ),
                )
                for number, value in enumerate(values)
            )
        )
        carried = [tuple((piece.begin, piece.end) for piece in each) for each in kept]
    return RowPlan(tuple(strips), tuple(ends))


def _ends_of(
    value: RowValue, values: Sequence[RowValue], ends: Sequence[tuple[int, ...]], num_strips: int
) -> tuple[int, ...]:
    """Return the number of rows of a value after each strip."""
    ready = [min(each) for each in zip(*(ends[read] for read in value.reads), strict=True)]
    if value.rule is not None:
        height = values[value.reads[0]].height
        ready = [
            value.height if rows == height else min(value.height, value.rule.ready(rows))
            for rows in ready
        ]
    if value.is_late:
        return (*[0] * (num_strips - 1), ready[-1])
    taken = (strip - (strip + 1) % value.together for strip in range(num_strips - 1))
    return (*(ready[strip] if strip >= 0 else 0 for strip in taken), ready[-1])


def _window(value: RowValue, values: Sequence[RowValue], news: Sequence[Span], number: int) -> Span:
    """Return the rows of other values that a value reads in a strip."""
    first, last = news[number]
    if value.is_summed:
        return news[value.reads[0]]
    if value.rule is None or first == last:
        return first, last
    begin, end = value.rule.reads(first, last)
    if value.has_zeros:
        return begin, end
    height = values[value.reads[0]].height
    begin = min(max(0, begin), height - 1)
    return begin, max(begin, min(height, end))


def _window_piece(window: Span, fresh: Span) -> Piece:
    """Return the piece of a window in the fresh piece.

    A window that consists of absent padding only reads no rows of the piece.
    """
    return Piece(FRESH, *(window if window[0] < window[1] else (fresh[0], fresh[0])))


def _next_row(reader: RowValue, height: int, rows: int) -> int:
    """Return the first row that a reader still needs after it has made `rows` rows.

    `height` is the height of the value that it reads.
    """
    if rows == reader.height or reader.is_summed:
        return height
    return (
        rows
        if reader.rule is None
        else min(max(0, reader.rule.reads(rows, rows + 1)[0]), height - 1)
    )


def _span(spans: Sequence[Span]) -> Span:
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _pieces(rows: Span, carried: Sequence[Span], fresh: Span, new: Span) -> tuple[Piece, ...]:
    """Return the pieces with the given rows, from the fresh piece if possible, else carried."""
    border = max(0, min(fresh[0], new[0]))
    own = max(rows[0], border), rows[1]
    return (
        *_overlap((rows[0], min(rows[1], border)), carried),
        *([Piece(FRESH, *own)] if own[0] < own[1] else []),
    )


def _overlap(rows: Span, carried: Sequence[Span]) -> tuple[Piece, ...]:
    spans = [(max(rows[0], begin), min(rows[1], end)) for begin, end in carried]
    return tuple(Piece(source, *span) for source, span in enumerate(spans) if span[0] < span[1])

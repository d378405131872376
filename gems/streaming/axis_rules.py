"""Rules that say which inputs an output of an operation reads, along one axis of the map.

They are the same for depth, rows and columns; the text speaks of rows. All spans are half-open and
counted from the start of the whole map. A rule may name rows outside the map: before its start
because of padding, and after its end because of padding or ceil mode.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

Span = tuple[int, int]


class Rule(Protocol):
    """The rows that an operation reads along an axis."""

    def reads(self, first: int, last: int) -> Span:
        """Return the input rows that output rows first to last read, at least one of each."""

    def ready(self, rows: int) -> int:
        """Return how many output rows read only the first `rows` input rows.

        The number may exceed the number of output rows.
        """


@dataclass(frozen=True, slots=True)
class Window:
    """A convolution, a pooling, a crop, or a slice with a step.

    Row o reads rows o * stride - top + i * dilation for i < kernel.
    """

    kernel: int = 1
    stride: int = 1
    top: int = 0
    dilation: int = 1

    def reads(self, first: int, last: int) -> Span:
        """Return the input rows that output rows first to last read."""
        return first * self.stride - self.top, (last - 1) * self.stride - self.top + self._reach + 1

    def ready(self, rows: int) -> int:
        """Return how many output rows read only the first `rows` input rows."""
        return max(0, (rows - 1 + self.top - self._reach) // self.stride + 1)

    @property
    def _reach(self) -> int:
        return self.dilation * (self.kernel - 1)


@dataclass(frozen=True, slots=True)
class Transposed:
    """A transposed convolution.

    Input row i adds to rows i * stride - top + j * dilation for j < kernel.
    """

    kernel: int
    stride: int = 1
    top: int = 0
    dilation: int = 1

    def reads(self, first: int, last: int) -> Span:
        """Return the input rows that output rows first to last read.

        A row that reads nothing counts as reading one row.
        """
        end = (last - 1 + self.top) // self.stride + 1
        begin = -((self.dilation * (self.kernel - 1) - first - self.top) // self.stride)
        return min(begin, end - 1), end

    def ready(self, rows: int) -> int:
        """Return how many output rows read only the first `rows` input rows."""
        return max(0, rows * self.stride - self.top)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A resampling: row o reads rows begins[o] to ends[o]; both lists never decrease."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def reads(self, first: int, last: int) -> Span:
        """Return the input rows that output rows first to last read."""
        return self.begins[first], self.ends[last - 1]

    def ready(self, rows: int) -> int:
        """Return how many output rows read only the first `rows` input rows."""
        return bisect_right(self.ends, rows)


@dataclass(frozen=True, slots=True)
class Bins:
    """An adaptive average: row o of `count` reads its share of `height` rows, rounded outwards."""

    height: int
    count: int

    def reads(self, first: int, last: int) -> Span:
        """Return the input rows that output rows first to last read."""
        return first * self.height // self.count, -(-last * self.height // self.count)

    def ready(self, rows: int) -> int:
        """Return how many output rows read only the first `rows` input rows."""
        return rows * self.count // self.height

    def begun(self, rows: int) -> int:
        """Return how many output rows read some of the first `rows` input rows."""
        return -(-rows * self.count // self.height)


def even_ends(size: int, parts: int) -> tuple[int, ...]:
    """Return the ends of parts that divide an axis of `size`, as equal as can be."""
    return tuple(size * part // parts for part in range(1, parts + 1))

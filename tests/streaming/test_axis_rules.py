"""Which rows an output row reads: the rules against what a loop over all rows finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.streaming.axis_rules import Bins, Lookup, Rule, Transposed, Window, even_ends

small = st.integers(1, 5)


def check(rule: Rule, rows_read: list[set[int]], height: int) -> None:
    """Compare with the input rows that each output row reads.

    Those outside of the map do not count for `ready`.
    """
    for first in range(len(rows_read)):
        for last in range(first + 1, len(rows_read) + 1):
            read = set().union(*rows_read[first:last])
            begin, end = rule.reads(first, last)
            assert begin < end and all(begin <= row < end for row in read)
    for rows in range(height):
        ready = 0
        while ready < len(rows_read) and all(row < rows for row in rows_read[ready]):
            ready += 1
        assert min(rule.ready(rows), len(rows_read)) <= ready


@settings(max_examples=60, deadline=None)
@given(small, small, st.integers(0, 4), small, st.integers(1, 12))
def test_a_window_reads_its_taps(
    kernel: int, stride: int, top: int, dilation: int, height: int
) -> None:
    rule = Window(kernel, stride, top, dilation)
    count = max(0, (height + 2 * top - dilation * (kernel - 1) - 1) // stride + 1)
    taps = [{row * stride - top + tap * dilation for tap in range(kernel)} for row in range(count)]
    check(rule, taps, height)
    for rows in range(1, height):  # as many as there can be
        ready = min(rule.ready(rows), count)
        assert ready == count or max(taps[ready]) >= rows
    if count:
        assert rule.reads(0, count) == (min(taps[0]), max(taps[-1]) + 1)


@settings(max_examples=60, deadline=None)
@given(small, small, st.integers(0, 3), small, st.integers(1, 8))
def test_a_transposed_window_reads_what_adds_to_it(
    kernel: int, stride: int, top: int, dilation: int, height: int
) -> None:
    count = (height - 1) * stride - 2 * top + dilation * (kernel - 1) + 1
    adders: list[set[int]] = [set() for _ in range(max(0, count))]
    for row in range(height):
        for tap in range(kernel):
            place = row * stride - top + tap * dilation
            if 0 <= place < count:
                adders[place].add(row)
    check(Transposed(kernel, stride, top, dilation), adders, height)


@given(st.integers(1, 20), st.integers(1, 20))
def test_bins_share_all_rows(height: int, count: int) -> None:
    rule = Bins(height, count)
    bins = [
        set(range(row * height // count, -(-(row + 1) * height // count))) for row in range(count)
    ]
    check(rule, bins, height)
    assert [rule.begun(rows) for rows in range(height + 1)] == [
        sum(min(each) < rows for each in bins) for rows in range(height + 1)
    ]


def test_a_lookup_is_a_table() -> None:
    rule = Lookup((0, 0, 1, 3), (1, 2, 4, 5))
    assert rule.reads(1, 3) == (0, 4)
    assert [rule.ready(rows) for rows in range(6)] == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("height", "strips", "ends"),
    [(10, 3, (3, 6, 10)), (1000, 4, (250, 500, 750, 1000)), (3, 3, (1, 2, 3))],
)
def test_strips_are_as_equal_as_can_be(height: int, strips: int, ends: tuple[int, ...]) -> None:
    assert even_ends(height, strips) == ends

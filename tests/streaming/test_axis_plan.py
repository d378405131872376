"""What parts make, read and keep along one axis, in networks of a few values."""

from __future__ import annotations

from collections.abc import Sequence

from gems.streaming.axis_plan import FRESH, AxisPlan, AxisValue, Part, Piece
from gems.streaming.axis_rules import Bins, Window

SAME = Window(3, 1, 1)


def image(*ends: int) -> AxisValue:
    return AxisValue(ends[-1], ends)


def conv(read: int, size: int, rule: Window = SAME) -> AxisValue:
    return AxisValue(size, (), rule, (read,), is_windowed=True, has_zeros=True)


def plan_of(values: Sequence[AxisValue], num_parts: int) -> tuple[AxisPlan, list[tuple[Part, ...]]]:
    """Return a plan, and the parts of each value that all of its readers read."""
    plan = AxisPlan(values, num_parts)
    readers = [
        frozenset(reader for reader, each in enumerate(values) if number in each.reads)
        for number in range(len(values))
    ]
    return plan, [plan.track(number, each) for number, each in enumerate(readers)]


def test_a_convolution_lags_by_its_reach() -> None:
    plan, (parts, _) = plan_of([image(4, 8, 12), conv(0, 12)], 3)
    assert plan.ends == [(4, 8, 12), (3, 7, 12)]
    first, second, last = parts
    assert first.fresh == (-1, 4)  # a row of zeros above the image
    assert first.kept == (Piece(FRESH, 2, 4),)
    assert (second.carried, second.copied, second.fresh) == (((2, 4),), (Piece(0, 2, 4),), (2, 8))
    assert last.fresh == (6, 13) and last.kept == ()
    assert [plan.window(1, part) for part in range(3)] == [(-1, 4), (2, 8), (6, 13)]


def test_a_sum_waits_for_the_slower_branch() -> None:
    """The input of two convolutions is added to their output.

    Two rows wait for it, and are not copied.
    """
    values = [image(4, 8, 12), conv(0, 12), conv(1, 12), AxisValue(12, reads=(0, 2))]
    plan, parts = plan_of(values, 3)
    assert plan.ends[2:] == [(2, 6, 12), (2, 6, 12)]
    assert [plan.taken(3, read, 1, parts[read][1]) for read in (0, 2)] == [
        (Piece(FRESH, 2, 6),),
        (Piece(FRESH, 2, 6),),
    ]
    assert parts[0][1].kept == (Piece(FRESH, 6, 8),)


def test_rows_of_a_long_skip_are_kept_as_they_came() -> None:
    """A branch that gives nothing before the last part.

    The other's rows wait in pieces, none is copied.
    """
    values = [
        image(2, 4, 6),
        conv(0, 6, Window(11, 1, 5)),
        AxisValue(6, reads=(0,)),
        AxisValue(6, reads=(1, 2)),
    ]
    plan, parts = plan_of(values, 3)
    assert plan.ends[3] == (0, 0, 6)
    assert parts[2][1].kept == (Piece(0, 0, 2), Piece(FRESH, 2, 4))
    assert parts[2][2].copied == ()
    assert plan.taken(3, 2, 2, parts[2][2]) == (Piece(0, 0, 2), Piece(1, 2, 4), Piece(FRESH, 4, 6))


def test_parts_thinner_than_the_kernel_wait() -> None:
    plan, parts = plan_of([image(1, 2, 3, 4), conv(0, 4, Window(7, 1, 3))], 4)
    assert plan.ends[1] == (0, 0, 0, 4)
    assert parts[0][3].copied == (Piece(0, 0, 1), Piece(1, 1, 2), Piece(2, 2, 3))


def test_rows_that_a_step_leaves_out_are_not_kept() -> None:
    plan, parts = plan_of([image(3, 6), conv(0, 2, Window(1, 5))], 2)
    assert plan.ends[1] == (1, 2)
    assert parts[0][0].kept == ()


def test_sums_keep_no_rows_and_come_last() -> None:
    values = [image(4, 8), AxisValue(1, (), Bins(8, 1), (0,), is_summed=True, is_late=True)]
    plan, parts = plan_of(values, 2)
    assert plan.ends[1] == (0, 1)
    assert [part.kept for part in parts[0]] == [(), ()]


def test_a_reader_that_is_left_out_needs_nothing() -> None:
    """In blocks, a reader may take nothing of a value in some rows."""
    plan, _ = plan_of([image(4, 8, 12), conv(0, 12)], 3)
    parts = plan.track(0, frozenset())
    assert [part.kept for part in parts] == [(), (), ()]
    assert [part.fresh for part in parts] == [(0, 4), (4, 8), (8, 12)]

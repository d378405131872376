"""What strips make, read and keep, in networks of a few values."""

from __future__ import annotations

from gems.streaming.row_plan import FRESH, Piece, RowValue, plan_rows
from gems.streaming.row_rules import Bins, Window

SAME = Window(3, 1, 1)


def image(*ends: int) -> RowValue:
    return RowValue(ends[-1], ends)


def conv(read: int, height: int, rule: Window = SAME) -> RowValue:
    return RowValue(height, (), rule, (read,), has_zeros=True)


def test_a_convolution_lags_by_its_reach() -> None:
    plan = plan_rows([image(4, 8, 12), conv(0, 12)], 3)
    assert plan.ends == ((4, 8, 12), (3, 7, 12))
    first, second, last = (strip[0] for strip in plan.strips)
    assert first.fresh == (-1, 4)  # a row of zeros above the image
    assert first.kept == (Piece(FRESH, 2, 4),)
    assert (second.carried, second.copied, second.fresh) == (((2, 4),), (Piece(0, 2, 4),), (2, 8))
    assert last.fresh == (6, 13) and last.kept == ()
    assert [strip[1].window for strip in plan.strips] == [(-1, 4), (2, 8), (6, 13)]


def test_a_sum_waits_for_the_slower_branch() -> None:
    """The input of two convolutions is added to their output.

    Two rows wait for it, and are not copied.
    """
    plan = plan_rows([image(4, 8, 12), conv(0, 12), conv(1, 12), RowValue(12, reads=(0, 2))], 3)
    assert plan.ends[2:] == ((2, 6, 12), (2, 6, 12))
    assert plan.strips[1][3].taken == ((Piece(FRESH, 2, 6),), (Piece(FRESH, 2, 6),))
    assert plan.strips[1][0].kept == (Piece(FRESH, 6, 8),)


def test_rows_of_a_long_skip_are_kept_as_they_came() -> None:
    """A branch that gives nothing before the last strip.

    The other's rows wait in pieces, none is copied.
    """
    values = [
        image(2, 4, 6),
        conv(0, 6, Window(11, 1, 5)),
        RowValue(6, reads=(0,)),
        RowValue(6, reads=(1, 2)),
    ]
    plan = plan_rows(values, 3)
    assert plan.ends[3] == (0, 0, 6)
    assert plan.strips[1][2].kept == (Piece(0, 0, 2), Piece(FRESH, 2, 4))
    assert plan.strips[2][2].copied == ()
    assert plan.strips[2][3].taken[1] == (Piece(0, 0, 2), Piece(1, 2, 4), Piece(FRESH, 4, 6))


def test_strips_thinner_than_the_kernel_wait() -> None:
    plan = plan_rows([image(1, 2, 3, 4), conv(0, 4, Window(7, 1, 3))], 4)
    assert plan.ends[1] == (0, 0, 0, 4)
    assert plan.strips[3][0].copied == (Piece(0, 0, 1), Piece(1, 1, 2), Piece(2, 2, 3))


def test_rows_that_a_step_leaves_out_are_not_kept() -> None:
    plan = plan_rows([image(3, 6), conv(0, 2, Window(1, 5))], 2)
    assert plan.ends[1] == (1, 2)
    assert plan.strips[0][0].kept == ()


def test_sums_keep_no_rows_and_come_last() -> None:
    values = [image(4, 8), RowValue(1, (), Bins(8, 1), (0,), is_summed=True, is_late=True)]
    plan = plan_rows(values, 2)
    assert plan.ends[1] == (0, 1)
    assert [strip[0].kept for strip in plan.strips] == [(), ()]

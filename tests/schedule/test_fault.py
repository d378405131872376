"""gems.schedule.formats.grid: the grid of a broken schedule."""

from __future__ import annotations

import pytest

from gems.errors import ScheduleError
from gems.schedule import generate
from gems.schedule.formats.grid import fault_grid
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from tests.helpers.drawings import edited, lines, text_of, with_rows


def drawing(schedule: Schedule, cap: float | None = None) -> list[str]:
    with pytest.raises(ScheduleError) as error:
        validate(schedule, cap=cap)
    return fault_grid(schedule, error.value).splitlines()


def test_a_deadlock() -> None:
    stuck = edited(generate("gpipe", 2, 2), 0, "0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1")
    assert drawing(stuck) == [
        "step      | 0   1     2",
        "rank    0 | 0F0 !0B0!",
        "rank    1 | .   1F0   1F1?",
    ]


def test_a_missing_action_stands_behind_its_row() -> None:
    short = with_rows(generate("1f1b", 2, 2), ["0F0 0F1 0B0 0B1", "1F0 1F1 1B1"])
    assert lines("\n".join(drawing(short))) == [
        "step | 0 1 2 3 4",
        "rank 0 | 0F0 0F1 0B0?",
        "rank 1 | . 1F0 1F1 1B1 !1B0!",
    ]


def test_the_second_of_two_is_the_fault() -> None:
    twice = edited(generate("gpipe", 1, 1), 0, "0F0 0B0", "0F0 0F0 0B0")
    assert drawing(twice)[1] == "rank    0 | 0F0 !0F0!"


def test_a_fault_behind_the_place_where_its_rank_is_stuck() -> None:
    """Rank 0 waits for ever at its first backward, and reduces before its last one."""
    stuck = lower(edited(generate("gpipe", 2, 2), 0, "0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1"))
    rows = drawing(edited(stuck, 0, "0B1 0REDUCE_GRAD", "0REDUCE_GRAD 0B1"))
    assert "0B0? " in rows[1] and rows[1].endswith("!0REDUCE_GRAD!")
    assert "".join(rows).count("!") == 2


def test_an_action_that_no_rank_could_run() -> None:
    unknown = edited(generate("gpipe", 2, 1), 1, "1F0 1B0", "1F0 7F0 1B0")
    assert lines(drawing(unknown)[2]) == ["rank 1 | . 1F0 !7F0!"]
    elsewhere = edited(generate("gpipe", 2, 1), 1, "1F0 1B0", "1F0 0F0/1 1B0")
    assert "!0F0/1!" in drawing(elsewhere)[2]


def test_a_cap_that_is_not_kept() -> None:
    rows = drawing(generate("gpipe", 2, 3), cap=2)
    assert rows[1].endswith("0F0 0F1 !0F2!")
    assert rows[2].endswith(".   1F0 1F1   1F2?"), rows[2]


def test_a_long_step_is_shown_around_the_fault() -> None:
    made = generate("1f1b", 2, 64)
    words = text_of(made)[0].split()
    words.remove("0B60")
    words.insert(100, "0B60")
    rows = drawing(with_rows(made, [" ".join(words), text_of(made)[1]]))
    assert rows[0].startswith("step      | ... ") and len(rows[0].split()) < 24
    assert rows[1].count("!") == 2 and len(rows) == 3


def test_of_many_ranks_those_around_the_fault_are_shown() -> None:
    made = generate("gpipe", 64, 2)
    texts = text_of(made)
    texts[50] = "50F0 50B0 50F1 50B1"
    rows = drawing(with_rows(made, texts))
    assert len(rows) == 34 and rows[-1] == "(ranks 32 to 63 of 64)"
    assert any(row.startswith("rank   50 |") and "!50B0!" in row for row in rows)


def test_a_row_too_few_draws_what_is_there() -> None:
    made = generate("gpipe", 3, 1)
    short = Schedule(made.name, 1, made.placement, made.rank_schedules[:2])
    assert lines("\n".join(drawing(short))) == [
        "step | 0 1 2",
        "rank 0 | 0F0 0B0?",
        "rank 1 | . 1F0 1B0?",
    ]


def test_a_reduction_that_a_peer_never_joins() -> None:
    made = lower(generate("gems_mast", 2, 2))
    stuck = edited(made, 0, "1B1/1 1SEND_B1/1 0REDUCE_GRAD", "1B1/1 0REDUCE_GRAD 1SEND_B1/1")
    rows = drawing(stuck)
    assert rows[1].endswith("!0REDUCE_GRAD!") and "?" in rows[2]

"""gems.schedule.formats.grid: the drawing of a schedule."""

from __future__ import annotations

import pytest

from gems.schedule import generate, published
from gems.schedule.action import Kind
from gems.schedule.formats.grid import MAX_COLUMNS, grid
from gems.schedule.lower import lower
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule
from tests.helpers.drawings import drawn, play, played_rows, uniform_cost, with_rows


@pytest.mark.parametrize("name", published())
def test_the_drawing_reads_back_as_the_replay(name: str) -> None:
    made = generate(name, 3, 12, 6)
    played = play(made, lambda action: 2.0 if action.kind is Kind.B else 1.0)
    picture = "\n".join(line.partition("|")[2] for line in grid(made, played).splitlines())
    assert drawn(picture, made.placement) == played_rows(made, played)


def test_lowered_is_drawn_like_compute_only() -> None:
    made = generate("1f1b", 3, 4)
    cost = uniform_cost(1, 2)
    assert grid(lower(made), play(lower(made), cost)) == grid(made, play(made, cost))


def test_unit_is_the_time_of_a_column() -> None:
    made = generate("gpipe", 2, 2)
    cost = uniform_cost(0.5, 1.0)
    assert grid(made, play(made, cost), unit=0.5) == grid(made, play(made, uniform_cost(1, 2)))


def test_a_long_step_is_cut_and_says_so() -> None:
    made = generate("layer_parallel", 8, 32)
    text = grid(made, play(made, uniform_cost(1, 2))).splitlines()
    assert text[-1] == f"({768 - MAX_COLUMNS} more columns)"
    assert {len(line.split("|")[1].split()) for line in text[:-1]} == {MAX_COLUMNS}


def test_the_stages_of_a_rank_have_letters() -> None:
    made = generate("interleaved_1f1b", 2, 2)
    played = play(made, lambda action: 1.0)
    rows = grid(made, played).splitlines()
    assert rows[0].startswith("rank    0 | F0a F1a F0b F1b ")
    assert {word[-1] for row in rows for word in row.split("|")[1].split() if word[0] in "FB"} == {
        "a",
        "b",
    }


def test_split_backwards_recomputation_and_no_copies_are_drawn() -> None:
    made = with_rows(
        Schedule("one", 2, linear(1), ((),)), ["0F0 0OFFLOAD0 0F1 0R1 0I1 0W1 0PREFETCH0 0B0"]
    )
    assert grid(made, play(made, lambda action: 1.0)) == "rank    0 | F0 F1 R1 I1 W1 .. B0"

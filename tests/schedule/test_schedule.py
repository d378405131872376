"""gems.schedule.schedule: the rows and what can be asked of them."""

from __future__ import annotations

import dataclasses

import pytest

from gems.schedule import generate
from gems.schedule.action import Action
from gems.schedule.lower import lower
from tests.helpers.drawings import text_of, with_rows

MADE = generate("gems_mast", 3, 2)


def test_counts() -> None:
    assert (MADE.num_ranks, MADE.num_stages, MADE.num_directions) == (3, 3, 2)
    assert (generate("gpipe", 4, 2).num_ranks, generate("gpipe", 4, 2).num_directions) == (4, 1)
    assert not MADE.has_transfers
    assert lower(MADE).has_transfers


def test_actions_go_rank_by_rank_in_order() -> None:
    pairs = [(rank, str(action)) for rank, action in MADE.actions()]
    assert pairs[:5] == [(0, "0F0"), (0, "0B0"), (0, "2F1/1"), (0, "2B1/1"), (1, "1F0")]
    assert len(pairs) == 12


def test_rank_of_an_action_depends_on_its_direction() -> None:
    assert MADE.rank_of(Action.parse("0F0")) == 0
    assert MADE.rank_of(Action.parse("0F1/1")) == 2
    assert MADE.rank_of(Action.parse("1SEND_B1/1")) == 1


def test_directions_of_micro_batches() -> None:
    assert MADE.directions() == {0: 0, 1: 1}
    assert generate("1f1b", 2, 3).directions() == {0: 0, 1: 0, 2: 0}


def test_a_schedule_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MADE.rank_schedules = ()  # type: ignore[misc]


def test_digest_tells_orders_apart() -> None:
    made = generate("1f1b", 3, 3)
    other_order = with_rows(
        made, [text_of(made)[0].replace("0F0 0F1", "0F1 0F0"), *text_of(made)[1:]]
    )
    schedules = [made, lower(made), generate("1f1b", 3, 4), generate("gpipe", 3, 3), other_order]
    assert len({schedule.digest() for schedule in schedules}) == len(schedules)
    assert generate("1f1b", 3, 3).digest() == made.digest()
    assert len(made.digest()) == 64

"""gems.schedule.dependencies: the one place that knows what an action needs."""

from __future__ import annotations

import pytest

from gems.schedule import generate
from gems.schedule.action import Action
from gems.schedule.dependencies import dependencies, transfers_after
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, linear
from gems.schedule.schedule import Schedule
from tests.helpers.drawings import with_rows

COMPUTE_ONLY = generate("gems_mast", 3, 2)
LOWERED = lower(COMPUTE_ONLY)
LOOPED = Schedule("looped", 1, Placement(2, ((0, 1, 1, 0),)), ((), ()), passes=("add_transfers",))


def needs(text: str, schedule: Schedule) -> list[str]:
    return [str(need) for need in dependencies(Action.parse(text), schedule)]


@pytest.mark.parametrize(
    ("action", "compute_only", "lowered"),
    [
        ("0F0", [], []),
        ("1F0", ["0F0"], ["1RECV_F0"]),
        ("2F0", ["1F0"], ["2RECV_F0"]),
        ("0F1/1", [], []),
        ("2F1/1", ["1F1/1"], ["2RECV_F1/1"]),
        ("2B0", ["2F0"], ["2F0"]),
        ("1B0", ["1F0", "2B0"], ["1F0", "1RECV_B0"]),
        ("0B1/1", ["0F1/1", "1B1/1"], ["0F1/1", "0RECV_B1/1"]),
        ("0SEND_F0", ["0F0"], ["0F0"]),
        ("1SEND_B1/1", ["1B1/1"], ["1B1/1"]),
        ("1RECV_F0", ["0SEND_F0"], ["0SEND_F0"]),
        ("1RECV_B1/1", ["2SEND_B1/1"], ["2SEND_B1/1"]),
        ("0REDUCE_GRAD", [], []),
        ("0STEP", [], []),
    ],
)
def test_needs(action: str, compute_only: list[str], lowered: list[str]) -> None:
    assert needs(action, COMPUTE_ONLY) == compute_only
    assert needs(action, LOWERED) == lowered


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("1F0", ["1RECV_F0"]),
        ("2F0", ["1F0"]),
        ("3F0", ["3RECV_F0"]),
        ("1B0", ["1F0", "2B0"]),
        ("0B0", ["0F0", "0RECV_B0"]),
    ],
)
def test_a_neighbour_on_the_same_rank_hands_over_without_a_message(
    action: str, expected: list[str]
) -> None:
    assert needs(action, LOOPED) == expected


def test_a_recompute_waits_for_its_inputs_and_a_backward_for_the_recompute() -> None:
    rows = ["0.0F0 0.1F0 0.1OFFLOAD0 0.1FREE0 0.1PREFETCH0 0.1R0 0.1B0 0.0R0 0.0B0"]
    schedule = with_rows(Schedule("inputs", 1, linear(1), ((),)), rows)
    assert needs("0.1PREFETCH0", schedule) == ["0.1FREE0"]
    assert needs("0.1R0", schedule) == ["0.1PREFETCH0"] and needs("0.0R0", schedule) == ["0.0F0"]
    assert needs("0.1B0", schedule) == ["0.1R0"] and needs("0.0B0", schedule) == ["0.0R0", "0.1B0"]


@pytest.mark.parametrize(
    ("action", "send", "receive", "rank"),
    [
        ("0F0", "0SEND_F0", "1RECV_F0", 1),
        ("1B0", "1SEND_B0", "0RECV_B0", 0),
        ("0F1/1", "0SEND_F1/1", "1RECV_F1/1", 1),
        ("1F1/1", "1SEND_F1/1", "2RECV_F1/1", 0),
        ("2B1/1", "2SEND_B1/1", "1RECV_B1/1", 1),
    ],
)
def test_transfer(action: str, send: str, receive: str, rank: int) -> None:
    expected = [(Action.parse(send), Action.parse(receive), rank)]
    assert transfers_after(Action.parse(action), COMPUTE_ONLY) == expected


@pytest.mark.parametrize("action", ["2F0", "0B0", "0SEND_F0", "1RECV_B0", "0REDUCE_GRAD", "0STEP"])
def test_nothing_to_send(action: str) -> None:
    assert transfers_after(Action.parse(action), COMPUTE_ONLY) == []


@pytest.mark.parametrize("action", ["1F0", "2B0"])
def test_nothing_to_send_to_oneself(action: str) -> None:
    assert transfers_after(Action.parse(action), LOOPED) == []

"""gems.schedule.action: the text form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.errors import ConfigError
from gems.schedule.action import (
    COMPUTE_KINDS,
    COPY_KINDS,
    RANK_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    WAIT_KINDS,
    Action,
    Kind,
)

COUNTS = st.integers(0, 2000)
ACTIONS = st.builds(
    Action,
    kind=st.sampled_from(Kind),
    stage=COUNTS,
    micro_batch=st.none() | COUNTS,
    direction=st.integers(0, 3),
    segment=st.none() | COUNTS,
)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F5", Action(Kind.F, 2, 5)),
        ("0B3/1", Action(Kind.B, 0, 3, 1)),
        ("0SEND_B3/1", Action(Kind.SEND_B, 0, 3, 1)),
        ("12RECV_F340", Action(Kind.RECV_F, 12, 340)),
        ("2.1F5/1", Action(Kind.F, 2, 5, 1, 1)),
        ("0REDUCE_GRAD", Action(Kind.REDUCE_GRAD, 0)),
        ("3STEP", Action(Kind.STEP, 3)),
        ("0F0/0", Action(Kind.F, 0, 0)),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert Action.parse(text) == Action.parse(f"  {text}\n") == action
    assert str(action) == text.removesuffix("/0")


@given(ACTIONS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_text_goes_round(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F5", "2", "2F5/", "2F-1", "-2F5", "2.F5", "2F5 3F5", "2f5", "2F5.1", "2F1/x"]
)
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed") as error:
        Action.parse(text)
    assert (error.value.key, error.value.value) == ("action", text)


@pytest.mark.parametrize("text", ["2FF5", "0SEND5", "1RECV_W2", "0_3"])
def test_unknown_kind_is_named_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kind \w+: allowed: F, B, I, W, R, SEND_F"):
        Action.parse(text)


def test_kinds_fall_into_classes() -> None:
    classes = [
        COMPUTE_KINDS,
        COPY_KINDS,
        WAIT_KINDS,
        SEND_KINDS,
        RECV_KINDS,
        RANK_KINDS,
        {Kind.START_REDUCE},
    ]
    assert frozenset().union(*classes) == frozenset(Kind)
    assert sum(map(len, classes)) == len(Kind)

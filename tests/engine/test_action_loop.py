"""The loop over a row: order, handlers, polls, heartbeats, and kinds that cannot run."""

from __future__ import annotations

import pytest

from gems.engine.action_loop import ActionLoop
from gems.errors import ScheduleError
from gems.schedule.action import Action, Kind, backward, forward

ROW = (
    forward(0, 0),
    forward(0, 1),
    Action(Kind.SEND_F, 0, 1),
    backward(0, 0),
    Action(Kind.STEP, 0),
)


class Beats:
    def __init__(self, log: list) -> None:
        self._log = log

    def beat(self, step: int, action: str) -> None:
        self._log.append(("beat", step, action))


def test_each_action_is_marked_run_and_followed_by_a_poll():
    log: list = []
    handlers = {
        kind: lambda action: log.append(("run", action)) for kind in {action.kind for action in ROW}
    }
    ActionLoop(0, ROW, handlers, lambda: log.append("poll"), Beats(log)).run(7)
    expected = [entry for a in ROW for entry in (("beat", 7, str(a)), ("run", a), "poll")]
    assert log == expected


def test_each_kind_goes_to_its_own_handler():
    seen = []
    handlers = {kind: lambda action, kind=kind: seen.append((kind, action)) for kind in Kind}
    ActionLoop(0, ROW, handlers, lambda: None).run(0)
    assert seen == [(action.kind, action) for action in ROW]


def test_a_kind_without_a_handler_is_refused_before_the_first_step():
    handlers = dict.fromkeys((Kind.F, Kind.SEND_F, Kind.STEP), print)
    with pytest.raises(ScheduleError, match=r"rank 3, action 0B0: .*kind B.* cannot run here"):
        ActionLoop(3, ROW, handlers, lambda: None)


def test_a_failing_action_ends_the_row_and_the_heartbeat_names_it():
    log: list = []

    def fail(action: Action) -> None:
        raise ValueError(str(action))

    loop = ActionLoop(0, ROW, dict.fromkeys(Kind, print) | {Kind.B: fail}, lambda: None, Beats(log))
    with pytest.raises(ValueError, match="0B0"):
        loop.run(2)
    assert log[-1] == ("beat", 2, "0B0")

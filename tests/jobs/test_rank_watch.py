"""When the launcher ends the ranks.

After a failure, once all are still by its own clock, or without a run folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gems.runs import heartbeat as heartbeat_module
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from jobs.batch.resources import job_spec
from jobs.diagnosis.launcher_output import OUR_LINE, LauncherOutput
from jobs.launch import rank_watch
from jobs.launch.rank_watch import MARGIN_S, PHASE_FACTOR, RankWatch, Reason
from tests.helpers.job_helpers import MonkeyPatch, Prepared, Resolved

LIMIT_S = 20.0


class Clock:
    """The launcher's monotonic clock, which a test turns on."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rank_watch, "time", clock)
    return clock


@pytest.fixture
def output() -> LauncherOutput:
    return LauncherOutput()


@pytest.fixture
def folder(prepared: Prepared) -> RunFolder:
    return prepared("one", "partition=even")


@pytest.fixture
def watch(
    clock: Clock, folder: RunFolder, output: LauncherOutput, resolved: Resolved
) -> Callable[[float], Reason | None]:
    """Watch for some seconds, and return why the ranks are to be ended, if they are."""
    watch = RankWatch(folder, job_spec(resolved("cluster=mini")), LIMIT_S, output, lambda: None)

    def go_on(
        seconds: float, each_s: float = 1.1, turn: Callable[[], None] = lambda: None
    ) -> Reason | None:
        end_s = clock.now_s + seconds
        while clock.now_s < end_s and not watch.is_over():
            clock.now_s += each_s
            turn()
        return watch.reason

    return go_on


def ranks(folder: RunFolder, *actions: str, step: int = 7) -> list[Heartbeat]:
    beats = [Heartbeat(folder.heartbeat(rank)) for rank in range(len(actions))]
    for beat, action in zip(beats, actions, strict=True):
        beat.beat(step, action)
        beat.live()
    return beats


@pytest.mark.parametrize("ahead_s", [0, 3600, -3600])
def test_ranks_that_are_all_still_have_stalled_whatever_their_clock_says(
    watch: Callable[..., Reason | None],
    folder: RunFolder,
    monkeypatch: MonkeyPatch,
    ahead_s: int,
    output: LauncherOutput,
) -> None:
    monkeypatch.setattr(heartbeat_module, "_clock_ns", heartbeat_module._clock_ns + ahead_s * 10**9)
    beats = ranks(folder, "0F1", "1F0", "2F0", "3F0")
    assert watch(10 * LIMIT_S, turn=lambda: beats[2].live("2RECV_F1")) is None, (
        "one rank shows signs of life"
    )
    assert watch(LIMIT_S + MARGIN_S - 3) is None
    assert watch(8) is Reason.STALLED
    found = json.loads(folder.stalled_json.read_text())
    assert found["by"] == "launcher" and found["roots"][0]["rank"] in range(4)
    assert found["cause"].startswith("no rank has sent a heartbeat for 2")
    assert (folder.logs / "ranks.log").read_text() == f"{OUR_LINE}: {Reason.STALLED.value}\n"
    output.feed_line("srun: error: n1: task 0: Killed")
    assert [death.is_cleanup for death in output.deaths] == [True]


def test_a_phase_may_take_longer(watch: Callable[..., Reason | None], folder: RunFolder) -> None:
    ranks(folder, "checkpoint", "checkpoint", step=-1)
    assert watch(PHASE_FACTOR * LIMIT_S) is None
    assert watch(MARGIN_S + 5) is Reason.STALLED


def test_time_in_which_the_job_was_suspended_does_not_count(
    watch: Callable[..., Reason | None], folder: RunFolder
) -> None:
    ranks(folder, "0F1", "1F1")
    assert watch(4) is None
    assert watch(7200, each_s=3600.0) is None
    assert watch(LIMIT_S + MARGIN_S) is Reason.STALLED


def test_ranks_that_have_yet_to_start_are_waited_for(watch: Callable[..., Reason | None]) -> None:
    assert watch(100 * LIMIT_S) is None


def test_a_folder_that_is_gone_ends_the_ranks(
    watch: Callable[..., Reason | None], folder: RunFolder
) -> None:
    ranks(folder, "0F1")
    assert watch(3) is None
    moved = folder.path.rename(folder.path.with_name("elsewhere"))
    folder.heartbeat(0).parent.mkdir(parents=True)  # a rank may make a part of it again
    assert watch(5) is Reason.GONE
    shutil.rmtree(moved)


def test_a_file_system_that_does_not_answer_is_no_missing_folder(
    watch: Callable[..., Reason | None], monkeypatch: MonkeyPatch
) -> None:
    def stale(path: Path, **more: object) -> None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as context:
        context.setattr(Path, "stat", stale)
        assert watch(10) is None


@pytest.mark.parametrize(
    ("line", "limit_s"), [("srun: error: n1: task 0: Killed", 2.0), ("", 10.0)]
)
def test_a_failed_rank_that_ends_nobody_else(
    watch: Callable[..., Reason | None],
    folder: RunFolder,
    output: LauncherOutput,
    write_failed: Callable[..., None],
    line: str,
    limit_s: float,
) -> None:
    output.feed_line(line)
    if not line:
        write_failed(folder, 0, "2026", "ValueError: bad")
    assert watch(limit_s) is None
    assert watch(3) is Reason.FAILED_RANK

"""gems.runs.heartbeat: the last mark of a rank, which outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gems.runs import heartbeat as heartbeat_module
from gems.runs.heartbeat import SIZE_BYTES, Heartbeat, read_beat, set_clock

ROOT = Path(__file__).resolve().parents[2]


def test_marks_can_be_read_while_the_rank_lives(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat" / "rank0003"
    before_ns = time.time_ns()
    heartbeat = Heartbeat(path)
    first = read_beat(path)
    assert first is not None
    assert (first.pid, first.node, first.step, first.action) == (
        os.getpid(),
        os.uname().nodename,
        -1,
        "start",
    )
    heartbeat.beat(12, "2SEND_B5/1")
    second = read_beat(path)
    assert second is not None
    assert (second.step, second.action) == (12, "2SEND_B5/1")
    assert before_ns <= first.time_ns <= second.time_ns <= time.time_ns()
    heartbeat.close()


def test_a_shorter_mark_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    heartbeat.beat(1000000, "123RECV_B45678/1")
    heartbeat.beat(2, "0F1")
    beat = read_beat(tmp_path / "beat")
    assert beat is not None and (beat.step, beat.action) == (2, "0F1")
    assert (tmp_path / "beat").stat().st_size == SIZE_BYTES
    heartbeat.close()


def test_a_sign_of_life_stands_behind_the_mark(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    heartbeat.beat(3, "1B2")
    first = heartbeat.last()
    assert first is not None and (first.alive_ns, first.waits_for, first.moved_ns) == (
        0,
        "",
        first.time_ns,
    )
    moved_ns = time.time_ns()
    heartbeat.live("the sum over 4 ranks", moved_ns)
    second = read_beat(tmp_path / "beat")
    assert (
        second is not None and second.time_ns == first.time_ns <= second.alive_ns <= time.time_ns()
    )
    assert (second.waits_for, second.moved_ns) == ("the sum over 4 ranks", moved_ns)
    heartbeat.live()
    third = heartbeat.last()
    assert third is not None and (third.waits_for, third.moved_ns) == ("", third.time_ns)
    heartbeat.close()


def test_what_was_waited_for_before_a_mark_is_over(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    heartbeat.live("1RECV_F2", time.time_ns())
    alive = heartbeat.last()
    heartbeat.beat(4, "1F2")
    later = heartbeat.last()
    assert alive is not None and later is not None
    assert (alive.waits_for, later.waits_for) == ("1RECV_F2", "")
    assert later.alive_ns == alive.alive_ns and later.moved_ns == later.time_ns
    heartbeat.live("x" * 2 * SIZE_BYTES)
    assert (tmp_path / "beat").stat().st_size == SIZE_BYTES
    last = heartbeat.last()
    assert last is not None and (last.step, last.action) == (4, "1F2")
    heartbeat.close()


def test_a_clean_end_says_so(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    heartbeat.beat(5, "1B2")
    heartbeat.close()
    beat = read_beat(tmp_path / "beat")
    assert beat is not None and (beat.step, beat.action) == (-1, "finished")


def test_a_new_attempt_begins_afresh(tmp_path: Path) -> None:
    (tmp_path / "beat").write_text("1 node 7 3F4 " + "9" * 400)
    Heartbeat(tmp_path / "beat").close()
    beat = read_beat(tmp_path / "beat")
    assert beat is not None and (beat.pid, beat.action) == (os.getpid(), "finished")


def test_a_mark_too_long_does_not_break_the_rank(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    heartbeat.beat(1, "x" * 2 * SIZE_BYTES)
    assert read_beat(tmp_path / "beat") is None
    heartbeat.beat(2, "0F0")
    beat = read_beat(tmp_path / "beat")
    assert beat is not None and beat.step == 2
    heartbeat.close()


@pytest.mark.parametrize("content", [b"", bytes(SIZE_BYTES), b"12 node", b" " * SIZE_BYTES])
def test_no_mark_yet(tmp_path: Path, content: bytes) -> None:
    assert read_beat(tmp_path / "none") is None
    (tmp_path / "beat").write_bytes(content)
    assert read_beat(tmp_path / "beat") is None


@pytest.mark.timeout(60)
def test_a_killed_rank_leaves_its_last_mark(tmp_path: Path) -> None:
    rank = (
        "import sys; from pathlib import Path; from gems.runs.heartbeat import Heartbeat\nheartbeat"
        " = Heartbeat(Path(sys.argv[1])); heartbeat.beat(3, '1F2'); heartbeat.beat(4,"
        " '1B2')\nprint('ready', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "beat"
    with subprocess.Popen(
        [sys.executable, "-c", rank, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    beat = read_beat(path)
    assert beat is not None
    assert (beat.pid, beat.step, beat.action) == (process.pid, 4, "1B2")


def test_ranks_share_the_clock_of_the_first_even_where_their_own_is_set_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_module, "_clock_ns", 0)
    first_ns = time.time_ns() + 3600 * 10**9
    set_clock(first_ns)
    heartbeat = Heartbeat(tmp_path / "beat")
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    heartbeat.beat(3, "1B2")
    heartbeat.live()
    beat = heartbeat.last()
    assert beat is not None and first_ns <= beat.time_ns <= beat.alive_ns < first_ns + 60 * 10**9
    heartbeat.close()

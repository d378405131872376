"""gems.engine.supervision.watchdog: one rank's watch, without MPI.

Ends of whole runs are in test_hangs.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gems.engine.supervision import watchdog
from gems.engine.supervision.watchdog import LocalPeer, RankHeartbeats, Watchdog, request_stacks
from gems.engine.transport.polling import Waiter, WaitState
from gems.errors import StalledError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat, read_beat
from gems.schedule import generate
from gems.schedule.lower import lower
from gems.utils.atomic_io import read_json
from gems.utils.process_tree import start_time
from tests.helpers.processes import python

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 3


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.write_schedule(lower(generate("1f1b", NUM_RANKS, 4)))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)
    monkeypatch.setattr(watchdog, "CHECK_S", 0.04)
    yield
    for dog in DOGS:  # one that has found a hang goes on until its process ends
        dog._closing.set()
        if dog._thread.is_alive():
            dog._thread.join()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGUSR1)
            dog._stacks.close()
    DOGS.clear()


DOGS: list[Watchdog] = []


def watch(
    folder: RunFolder, heartbeat: Heartbeat, limit_s: float, *others: LocalPeer, rank: int = 0
) -> Watchdog:
    peers = [LocalPeer.this_process(rank), *others]
    DOGS.append(Watchdog(folder, rank, NUM_RANKS, heartbeat, limit_s, peers, WaitState()))
    return DOGS[-1]


def eventually(is_so, limit_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    look = threading.Event()
    while not is_so() and time.monotonic() < deadline_s:
        look.wait(0.01)
    return bool(is_so())


def test_a_rank_that_ends_well_leaves_nothing_but_its_mark(folder):
    heartbeat = Heartbeat(folder.heartbeat(0))
    with watch(folder, heartbeat, 60.0) as dog:
        heartbeat.beat(0, "0F0")
        begun = heartbeat.last()
        assert folder.stacks(0).exists(), "a signal's handler can open no file"
        assert eventually(lambda: heartbeat.last().alive_ns > begun.time_ns)
        dog._wait_state.what = "0RECV_B0"
        assert eventually(lambda: heartbeat.last().waits_for == "0RECV_B0")
        dog._wait_state.what = None
        assert eventually(lambda: heartbeat.last().waits_for == "")
        assert heartbeat.last().moved_ns > begun.time_ns, (
            "it has gone on since, though not in the list"
        )
    heartbeat.close()
    assert read_beat(folder.heartbeat(0)).action == "finished"
    assert not folder.stacks(0).parent.exists() and not folder.stalled_json.exists()


def test_a_wait_is_worth_it_while_somebody_moves(folder):
    heartbeat = Heartbeat(folder.heartbeat(0))
    other = Heartbeat(folder.heartbeat(1))
    heartbeat.beat(2, "0B0")
    other.beat(2, "1F1")
    begin_s = time.monotonic()
    come = []
    with watch(folder, heartbeat, 0.3) as dog:

        def move() -> None:
            other.beat(2, "1B0")
            other.live()
            if time.monotonic() - begin_s > 0.9:
                come.append(True)

        Waiter(move, 0.01, 0.3, dog._wait_state).wait_until(lambda: come, "0RECV_B0")
    assert time.monotonic() - begin_s > 0.9, "three times the limit"
    heartbeat.close()
    other.close()


def test_a_wait_ends_when_who_is_waited_for_stands_still(folder, capfd):
    heartbeat = Heartbeat(folder.heartbeat(0))
    other = Heartbeat(folder.heartbeat(1))
    heartbeat.beat(2, "0B0")
    other.beat(2, "1F1")
    with pytest.raises(StalledError) as raised, watch(folder, heartbeat, 0.3) as dog:
        Waiter(other.live, 0.01, 0.3, dog._wait_state).wait_until(lambda: False, "0RECV_B0")
    hang = read_json(folder.stalled_json)
    assert (hang["rank"], hang["step"], hang["action"], hang["pid"]) == (0, 2, "0B0", os.getpid())
    (root,) = hang["roots"]
    assert (root["rank"], root["step"], root["action"], root["state"]) == (1, 2, "1F1", "works")
    assert raised.value.waits_for == hang["waits_for"]
    assert hang["waits_for"].startswith("rank 0 waits in step 2, action 0B0 since ")
    assert "for 1SEND_B0 of rank 1, which works in step 2, action 1F1 since" in hang["waits_for"]
    text = folder.stacks(0).read_text()
    assert text.startswith("rank 0 on node ") and "step 2, action 0B0" in text and "for_" in text
    heartbeat.close()
    other.close()


def test_only_the_first_that_finds_a_stall_tells_it(folder):
    heartbeats = [Heartbeat(folder.heartbeat(rank)) for rank in range(2)]
    errors = []
    for rank in (1, 0):
        heartbeats[rank].beat(1, f"{rank}F1")
        with (
            pytest.raises(StalledError) as raised,
            watch(folder, heartbeats[rank], 60.0, rank=rank),
        ):
            raise StalledError("waited")
        errors.append(raised.value)
    assert read_json(folder.stalled_json)["rank"] == 1
    assert errors[0].waits_for is not None and errors[1].waits_for is None
    assert all("hangs" in folder.stacks(rank).read_text() for rank in range(2))
    for heartbeat in heartbeats:
        heartbeat.close()


def test_the_stall_of_another_rank_is_seen_and_stacks_are_left(folder):
    heartbeat = Heartbeat(folder.heartbeat(0))
    with watch(folder, heartbeat, 60.0):
        folder.stalled_json.write_text('{"rank": 2}')
        assert eventually(lambda: "another rank hangs" in folder.stacks(0).read_text())
    own = "in test_the_stall_of_another_rank"
    assert eventually(lambda: own in folder.stacks(0).read_text()), "the main thread's own stack"
    heartbeat.close()


ASKED = """
import itertools, signal
count = itertools.count(1)
signal.signal(signal.SIGUSR1, lambda *_: print("asked", next(count), flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_neighbours_are_asked_once_and_only_they(folder):
    """A process that was started by another time, or lives in a container of its own, is none of ours."""
    with subprocess.Popen(
        [sys.executable, "-c", ASKED], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        me = LocalPeer.this_process(0)
        real = LocalPeer(1, process.pid, start_time(process.pid), me.pid_namespace)
        strangers = [
            LocalPeer(1, process.pid, "12345", me.pid_namespace),
            LocalPeer(1, process.pid, real.started, me.pid_namespace + 1),
        ]
        request_stacks([me, *strangers], 0)
        request_stacks([real], 1)  # not itself
        request_stacks([me, real, *strangers], 0)
        assert process.stdout.readline() == "asked 1\n"
        os.kill(process.pid, signal.SIGUSR1)
        assert process.stdout.readline() == "asked 2\n", "and no more often before"
        process.kill()


def test_two_ranks_of_a_node_check_for_hangs(folder):
    heartbeat = Heartbeat(folder.heartbeat(5))
    peers = [LocalPeer.this_process(rank) for rank in (7, 5, 9, 8)]
    checks = {
        peer.rank: (
            Watchdog(folder, peer.rank, 12, heartbeat, 60.0, peers, WaitState())._checks_others
        )
        for peer in peers
    }
    assert checks == {5: True, 7: True, 8: False, 9: False}
    heartbeat.close()


def test_time_in_which_the_process_was_stopped_does_not_count(folder, monkeypatch):
    """SLURM suspends whole jobs; then all heartbeats are old, and no rank hangs."""
    heartbeat = Heartbeat(folder.heartbeat(0))
    heartbeat.beat(1, "0F1")
    other = Heartbeat(folder.heartbeat(1))
    monkeypatch.setattr(watchdog, "LATE_S", 1.0)
    dog = watch(folder, heartbeat, 0.5)
    dog._wait_state.what = "0RECV_B0"
    dog._ticked_s -= 100.0
    assert dog.is_progressing(), "the thread was stopped too"
    dog._stacks = sys.stderr
    dog._tick()
    assert dog._still_s < 0.1 and dog.is_progressing()
    heartbeat.close()
    other.close()


def test_a_file_system_without_room_for_stacks_does_not_stop_the_run(folder):
    (folder.path / "stacks").write_text("")
    heartbeat = Heartbeat(folder.heartbeat(0))
    with watch(folder, heartbeat, 60.0):
        assert eventually(lambda: heartbeat.last().alive_ns > 0)
    heartbeat.close()


def test_marks_are_read_once_and_gaps_are_left_out(folder):
    heartbeat = Heartbeat(folder.heartbeat(1))
    folder.heartbeat(2).write_text("1 n x y z")
    marks = RankHeartbeats(folder, NUM_RANKS)
    assert marks.known().keys() == {1} and len(marks) == NUM_RANKS and list(marks) == [0, 1, 2]
    before = marks[1]
    heartbeat.beat(3, "1F1")
    assert marks[1] is before and RankHeartbeats(folder, NUM_RANKS)[1].step == 3
    heartbeat.close()


ALONE = """
import sys
from pathlib import Path
from gems.engine.supervision import watchdog
from gems.engine.supervision.watchdog import LocalPeer, RankHeartbeats, Watchdog, request_stacks
from gems.engine.transport.polling import WaitState
from gems.runs.heartbeat import Heartbeat
from gems.runs.folder import RunFolder
watchdog.TICK_S, watchdog.GRACE_S, watchdog.DUMP_S = 0.05, 0.1, 0.1
folder = RunFolder(Path(sys.argv[1]))
heartbeat = Heartbeat(folder.heartbeat(0))
heartbeat.beat(4, sys.argv[2])
def stand_still():
    import ctypes
    ctypes.CDLL(None).pause()
with Watchdog(folder, 0, 1, heartbeat, 0.5, [LocalPeer.this_process(0)], WaitState()):
    stand_still()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("action", "least_s"), [("0F1", 0.5), ("checkpoint", 1.5)])
def test_a_rank_that_stands_still_ends_itself(folder, action: str, least_s: float):
    """Alone in C, so nobody else can find it.

    A phase outside of the schedule may take three times as long.
    """
    ended = python("-c", ALONE, str(folder.path), action)
    assert ended.returncode == StalledError.exit_code, ended.stderr
    record = read_json(folder.failed_json(0))
    assert (record["kind"], record["exit_code"], record["step"], record["action"]) == (
        "StalledError",
        5,
        4,
        action,
    )
    assert record["cause"].startswith(f"rank 0 has been in {action} for ")
    assert any("in stand_still" in line for line in record["traceback"])
    assert "stand_still" in folder.stacks(0).read_text()
    hang = read_json(folder.stalled_json)
    assert hang["rank"] == 0 and hang["waited_s"] >= least_s
    assert [(root["rank"], root["state"]) for root in hang["roots"]] == [(0, "works")]

"""Stalls of whole runs under mpiexec.

They end in time, with exit code 5, the stacks, and the rank at fault.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from gems.launch.local_launcher import QUIET, Ended, mpiexec_argv, rank_environment, run_ranks
from gems.launch.mpich_cleanup import remove_stale_shared_memory
from gems.runs.heartbeat import Beat, read_beat
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json
from tests.helpers.toys import make_spec

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 3
HANG_TIMEOUT_S = 4.0
END_LIMIT_S = HANG_TIMEOUT_S + 30
START_LIMIT_S = 120.0
CHANGES = {
    "machine__kind": "emulated",
    "cost__unit_s": 0.004,
    "cost__boundary_bytes": 100_000,
    "cost__activation_bytes": 700,
    "train__steps": 1_000_000,
    "train__hang_timeout_s": HANG_TIMEOUT_S,
}


@pytest.fixture(scope="module", autouse=True)
def shared_memory():
    """Ranks that are killed leave MPICH's files behind."""
    yield
    remove_stale_shared_memory()


class Run:
    """Run ranks in the background until they end.

    They are stopped when nobody records a failure's end for as long as the launcher waits.
    """

    def __init__(self, path: Path, *block: str, **changes: object) -> None:
        self.folder = prepare(make_spec("1f1b", NUM_RANKS, runs_dir=str(path), **CHANGES | changes))
        module = ["tests.helpers.blocked_rank"] if block else ["gems.engine.run"]
        self._argv = mpiexec_argv(
            NUM_RANKS, [sys.executable, "-m", *module, str(self.folder.path), *block]
        )
        self.ended: Ended | None = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        environment = rank_environment(1) | {"PYTHONPATH": str(ROOT)}
        self.ended = run_ranks(self._argv, environment, QUIET, START_LIMIT_S + END_LIMIT_S)
        self.ended_s = time.monotonic()

    def wait_for_step(self, rank: int, step: int) -> Beat:
        deadline_s = time.monotonic() + START_LIMIT_S
        look = threading.Event()
        while time.monotonic() < deadline_s and self.ended is None:
            beat = read_beat(self.folder.heartbeat(rank))
            if beat is not None and beat.step >= step:
                return beat
            look.wait(0.01)
        raise AssertionError(f"rank {rank} never came to step {step}: {self.ended}")

    def wait(self) -> Ended:
        self._thread.join()
        assert self.ended is not None and not self.ended.timed_out, self.ended
        return self.ended

    def failures(self) -> dict[int, dict]:
        found = {rank: read_json(self.folder.failed_json(rank)) for rank in range(NUM_RANKS)}
        return {rank: record for rank, record in found.items() if record}


def check_hang(run: Run, culprit: int, state: str) -> dict:
    """Check what every stall leaves, and gives STALLED.json."""
    hang = read_json(run.folder.stalled_json)
    assert [(root["rank"], root["state"]) for root in hang["roots"]] == [(culprit, state)], hang
    records = run.failures()
    assert hang["rank"] in records
    assert {record["exit_code"] for record in records.values()} == {5}
    assert {record["kind"] for record in records.values()} == {"StalledError"}
    return hang


@pytest.mark.timeout(240)
def test_a_stopped_rank_is_blamed_and_the_others_leave_their_stacks(tmp_path):
    run = Run(tmp_path)
    stopped = run.wait_for_step(1, 3)
    os.kill(stopped.pid, signal.SIGSTOP)
    begin_s = time.monotonic()
    run.wait()
    assert run.ended_s - begin_s < END_LIMIT_S
    hang = check_hang(run, 1, "is silent")
    assert hang["rank"] != 1 and hang["roots"][0]["pid"] == stopped.pid
    assert "of rank 1, which is silent in step" in hang["waits_for"]
    for rank in (0, 2):
        assert "Thread 0x" in run.folder.stacks(rank).read_text(), rank
    assert run.folder.stacks(1).read_text() == ""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "state"), [("free", "works"), ("holding", "is silent")])
def test_a_rank_that_never_comes_back_from_c_is_blamed(tmp_path, how: str, state: str):
    """`holding`: the C code keeps the interpreter, so no thread of that rank runs.

    Its stacks are written all the same.
    """
    run = Run(tmp_path, "1", "2", how)
    run.wait_for_step(1, 2)
    begin_s = time.monotonic()
    run.wait()
    assert run.ended_s - begin_s < END_LIMIT_S
    hang = check_hang(run, 1, state)
    assert (hang["roots"][0]["step"], hang["roots"][0]["action"]) == (2, "1F1")
    for rank in range(NUM_RANKS):
        text = run.folder.stacks(rank).read_text()
        assert "Thread 0x" in text, rank
    assert "in never_return" in run.folder.stacks(1).read_text()


@pytest.mark.timeout(240)
def test_a_rank_that_is_slow_but_moves_is_left_alone(tmp_path):
    """The last rank waits for two forwards of three seconds each, the first for yet longer.

    No action takes the limit.
    """
    run = Run(
        tmp_path,
        cost__unit_s=1.0,
        cost__forward=3.0,
        parallel__micro_batches=1,
        train__steps=1,
        benchmark__skip_steps=0,
        schedule__name="gpipe",
        data__prefetch_steps=0,
    )
    ended = run.wait()
    assert ended.returncode == 0, ended.tail
    assert not run.folder.stalled_json.exists() and not run.failures()
    assert not run.folder.stacks(0).parent.exists(), "nothing is left of a run that ends well"


@pytest.mark.timeout(240)
def test_sigusr1_shows_the_stacks_and_ends_nothing(tmp_path):
    run = Run(tmp_path, train__steps=40)
    beat = run.wait_for_step(2, 2)
    os.kill(beat.pid, signal.SIGUSR1)
    ended = run.wait()
    assert ended.returncode == 0, ended.tail
    assert "gems/engine/emulation/run.py" in run.folder.stacks(2).read_text()
    assert not run.folder.stacks(0).exists() and not run.folder.stalled_json.exists()

"""The stop listener in processes of its own, whose main thread is inside C for good."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gems.engine.supervision.stop_request import StopListener, read_reason, stop_listener

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0
# A second thread tells what the watch says; the first is in a call that no signal may end, as a
# rank is in MPI's.
PROGRAM = """
import ctypes, os, pathlib, signal, sys, threading, types
from gems.engine.supervision.stop_request import StopListener
libc, stop_json = ctypes.CDLL(None), pathlib.Path(sys.argv[1])
if "garbled" in sys.argv:
    wait, garbled = signal.sigtimedwait, [types.SimpleNamespace(si_signo=-2078979536)]
    signal.sigtimedwait = lambda *given: garbled.pop() if garbled else wait(*given)
if "older" in sys.argv:
    threading.Thread(target=libc.sleep, args=(600,), daemon=True).start()
watch = StopListener(stop_json if "looks" in sys.argv else None, sigterm_asks="spares" in sys.argv)
watch.start()
if "closed" in sys.argv:
    watch.close()

def tell():
    told, pause = None, threading.Event()
    while True:
        if watch.reason() != told:
            told = watch.reason()
            print(told, flush=True)
        pause.wait(0.02)

threading.Thread(target=tell, daemon=True).start()
print("ready", flush=True)
libc.sleep(600)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the program; it is ready when this returns."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "stop.json"), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert says(process) == "ready"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen[str]) -> str:
    """Return the next line of the program."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LIMIT_S)[0], "it said nothing"
    return process.stdout.readline().strip()


@pytest.mark.parametrize("age", [(), ("older",)])
def test_a_signal_is_heard_while_the_main_thread_is_in_c(
    rank: Callable[..., subprocess.Popen[str]], age: tuple[str, ...]
) -> None:
    """Also when a thread that is older than the watch may be given the signal."""
    process = rank(*age)
    process.send_signal(signal.SIGUSR2)
    assert says(process) == "SIGUSR2"
    assert process.poll() is None


def test_a_wait_that_returns_a_number_from_nowhere_asks_for_nothing(
    rank: Callable[..., subprocess.Popen[str]],
) -> None:
    """As Python's sigtimedwait does when its time is over while another signal interrupts it."""
    process = rank("garbled")
    process.send_signal(signal.SIGUSR2)
    assert says(process) == "SIGUSR2"


def test_a_file_is_seen(rank: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = rank("looks")
    (tmp_path / "stop.json").write_text('{"reason": "the time is\\nover", "utc": "", "by": "me"}')
    assert says(process) == "the time is over"


def test_one_sigterm_is_spared_and_the_second_ends(
    rank: Callable[..., subprocess.Popen[str]],
) -> None:
    process = rank("spares")
    process.send_signal(signal.SIGTERM)
    assert says(process) == "SIGTERM"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_warning_before_does_not_spare_two(rank: Callable[..., subprocess.Popen[str]]) -> None:
    process = rank("spares")
    process.send_signal(signal.SIGUSR2)
    assert says(process) == "SIGUSR2"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_elsewhere_sigterm_ends_at_once(rank: Callable[..., subprocess.Popen[str]]) -> None:
    process = rank()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_closed_watch_gives_the_signals_back(rank: Callable[..., subprocess.Popen[str]]) -> None:
    process = rank("spares", "closed")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_closing_restores_this_process(tmp_path: Path) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handler = signal.getsignal(signal.SIGUSR2)
    watch = StopListener(tmp_path / "stop.json", sigterm_asks=True)
    watch.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask | {signal.SIGUSR2, signal.SIGTERM}
    watch.close()
    watch.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert signal.getsignal(signal.SIGUSR2) == handler
    assert watch.reason() is None


def test_what_the_file_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "stop.json"
    assert read_reason(path) is None
    for text, reason in (
        ("", "stop.json"),
        ("[]", "stop.json"),
        ('{"by": "me"}', "stop.json"),
        ('{"reason": "x"}', "x"),
    ):
        path.write_text(text)
        assert read_reason(path) == reason


def test_one_rank_looks_and_those_of_srun_spare(tmp_path: Path) -> None:
    path = tmp_path / "stop.json"
    looking = stop_listener(path, 0, {"SLURM_STEP_ID": "0"})
    other = stop_listener(path, 1, {})
    assert (looking._stop_json, other._stop_json) == (path, None)
    assert signal.SIGTERM in looking._signals and signal.SIGTERM not in other._signals

"""gems.utils.process_tree: the end of a process that is not our child, and of all under it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gems.utils.process_tree import end_stranger, is_alive, start_time

PARENT = """
import signal, subprocess, sys
{handler}
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
while True:
    signal.pause()
"""
DEAF = "signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))"
Start = Callable[[str], tuple[subprocess.Popen[str], int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process with a child in a session of its own; gives it and the child's number."""
    started: list[tuple[subprocess.Popen[str], int]] = []

    def run(handler: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT.format(handler=handler)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        child = int(process.stdout.readline())
        started.append((process, child))
        threading.Thread(
            target=process.wait
        ).start()  # a child of ours must be waited for to be gone
        return started[-1]

    yield run
    for process, child in started:
        process.kill()
        if Path(f"/proc/{child}").exists():
            os.kill(child, signal.SIGKILL)
        process.communicate()


def test_one_that_hears_sigterm_ends_its_own(start: Start) -> None:
    process, child = start("")
    assert end_stranger(process.pid, start_time(process.pid), grace_s=30.0)
    assert process.wait() == -signal.SIGTERM
    assert is_alive(child, start_time(child))  # it was its parent's to end


def test_one_that_is_deaf_and_all_under_it_are_killed(start: Start) -> None:
    process, child = start(DEAF)
    started = start_time(child)
    assert end_stranger(process.pid, start_time(process.pid), grace_s=0.3)
    assert process.wait() == -signal.SIGKILL
    pause = threading.Event()
    deadline_s = time.monotonic() + 30.0
    while is_alive(child, started):  # it may take a moment to die
        assert time.monotonic() < deadline_s
        pause.wait(0.02)


def test_a_stopped_one_is_woken(start: Start) -> None:
    process, _ = start("")
    process.send_signal(signal.SIGSTOP)
    assert end_stranger(process.pid, start_time(process.pid), grace_s=30.0)
    assert process.wait() == -signal.SIGTERM


def test_one_may_go_on_with_something_else(start: Start) -> None:
    process, _ = start(DEAF)
    assert process.stdout is not None

    def has_ended() -> bool:
        return process.stdout is not None and process.stdout.readline() == "heard\n"

    assert end_stranger(process.pid, start_time(process.pid), 30.0, has_ended)
    assert process.poll() is None


def test_another_process_of_the_same_number_is_left_alone(start: Start) -> None:
    process, _ = start("")
    assert end_stranger(process.pid, "1", grace_s=30.0)
    assert is_alive(process.pid, start_time(process.pid))
    assert end_stranger(2**22 + 1, "1", grace_s=30.0) and start_time(2**22 + 1) == ""

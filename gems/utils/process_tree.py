"""Find and end a process and all its descendants, even if the process is not our child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

POLL_S = 0.1


def end_family(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process that leads its session and all its descendants, in other sessions too.

    SIGTERM goes to its process group. Processes that survive `grace_s` get SIGKILL.
    """
    if process.poll() is not None:
        return
    family = _descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    _kill_all(family)
    process.wait()


def end_stranger(
    pid: int, started: str, grace_s: float, has_ended: Callable[[], bool] = lambda: False
) -> bool:
    """End the work of a process that is not our child, and return whether it has ended.

    SIGTERM goes only to the process, which ends its own children. It may keep running once
    `has_ended` is true. After `grace_s` it and all its descendants get SIGKILL. A process with the
    same number that did not start at `started` counts as gone.

    Raises:
        PermissionError: The process belongs to another user.
    """
    if not is_alive(pid, started):
        return True
    family = {*_descendants(pid)}
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # a stopped process would not receive SIGTERM
    if _wait_gone(pid, started, grace_s, has_ended):
        return True
    if start_time(pid) == started:
        family |= {psutil.Process(pid), *_descendants(pid)}
    _kill_all(family)
    return _wait_gone(pid, started, grace_s, has_ended)


def _wait_gone(pid: int, started: str, limit_s: float, has_ended: Callable[[], bool]) -> bool:
    pause = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while is_alive(pid, started) and not has_ended():
        if time.monotonic() > deadline_s:
            return False
        pause.wait(POLL_S)
    return True


def is_alive(pid: int, started: str) -> bool:
    """Return whether the process that started at `started` (see `start_time`) still runs."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X") and fields[19] == started


def start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since the machine's start.

    Return an empty string if there is no such process.
    """
    fields = _stat(pid)
    return fields[19] if fields else ""


def _kill_all(family: Iterable[psutil.Process]) -> None:
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _descendants(root: int) -> list[psutil.Process]:
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or none without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_mentioned(text: str) -> bool:
    """Return whether a local process has a text in its command line or in an open file's name.

    Only the open files of the user's own processes are visible. A process keeps its open files
    while it is about to become another program.
    """
    return any(
        text
        in " ".join(
            (
                *(process.info["cmdline"] or ()),
                *(file.path for file in process.info["open_files"] or ()),
            )
        )
        for process in psutil.process_iter(["cmdline", "open_files"])
    )

"""A process and all that it started, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def end_family(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends a process that leads its session and all under it, also those that went into sessions of their own.

    SIGTERM goes to its process group; what lives after `grace_s` gets SIGKILL.
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
    for pid, started in family.items():
        if _start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(root: int) -> dict[int, str]:
    """Gives the processes under `root` with their start times, as numbers come again."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(path.name))
        if fields:
            parents[int(path.name)] = int(fields[1])
    family: dict[int, str] = {}
    frontier = [root]
    while frontier:
        frontier = [pid for pid, parent in parents.items() if parent in frontier]
        family.update({pid: _start_time(pid) for pid in frontier})
    return family


def _start_time(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """Gives the fields of /proc/PID/stat from the state on; none when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []

"""The heartbeat: the action that a rank is in, in a small file that outlives the rank."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 256


class Heartbeat:
    """Marks step and action in a memory-mapped file, so that also a rank killed by SIGKILL leaves its last mark."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._head = f"{os.getpid()} {os.uname().nodename}"
        with path.open("w+b") as file:
            file.truncate(SIZE_BYTES)
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
        self.beat(-1, "start")

    def beat(self, step: int, action: str) -> None:
        """Marks that `action` of `step` begins now."""
        text = f"{self._head} {step} {action} {time.time_ns()}"
        self._map[:] = text.encode()[:SIZE_BYTES].ljust(SIZE_BYTES)

    def close(self) -> None:
        """Marks a clean end and releases the file."""
        self.beat(-1, "finished")
        self._map.close()


@dataclass(frozen=True, slots=True)
class Beat:
    """The last mark of a rank: step -1 is outside of training; action "finished" is a clean end."""

    pid: int
    node: str
    step: int
    action: str
    time_ns: int


def read_beat(path: Path) -> Beat | None:
    """Reads the last mark of a rank; None where there is none yet."""
    try:
        words = path.read_bytes().split()
    except FileNotFoundError:
        return None
    if len(words) != 5:
        return None
    pid, node, step, action, time_ns = words
    return Beat(int(pid), node.decode(), int(step), action.decode(), int(time_ns))

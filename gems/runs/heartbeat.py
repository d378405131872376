"""The heartbeat: the current action of a rank, in a small file that outlives the rank.

Its times are on the clock that rank 0 had at the start, because the clocks of nodes may differ or
be set during the run. So ranks may compare them with each other; other processes must not compare
them with their own clock, and can only see them change.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 256
FINISHED = "finished"  # the last action of a clean end
MARK_BYTES = 160  # the mark of the rank's own thread; the rest is its watchdog's
_clock_ns = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Return the time since the epoch on the clock that the ranks of a run share."""
    return time.monotonic_ns() + _clock_ns


def set_clock(time_ns: int) -> None:
    """Set the shared clock to rank 0's present time."""
    global _clock_ns
    _clock_ns = time_ns - time.monotonic_ns()


class Heartbeat:
    """A mark of the current step and action in a memory-mapped file, which survives SIGKILL.

    The mark is followed by a sign of life, with the name of what the rank waits for. The watchdog
    thread renews it, unless the process is stopped or its interpreter is blocked.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._head = f"{os.getpid()} {os.uname().nodename}"
        with path.open("w+b") as file:
            # a sparse file could end the rank by SIGBUS on a full file system
            file.write(b" " * SIZE_BYTES)
            file.flush()
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
        self.beat(-1, "start")

    def beat(self, step: int, action: str) -> None:
        """Mark that `action` of `step` begins now."""
        text = f"{self._head} {step} {action} {now_ns()}"
        self._map[:MARK_BYTES] = text.encode()[:MARK_BYTES].ljust(MARK_BYTES)

    def live(self, waits_for: str = "", moved_ns: int = 0) -> None:
        """Renew the sign of life, with what the rank waits for (nothing if it works) since when."""
        text = f"{now_ns()} {moved_ns} {waits_for}"
        size = SIZE_BYTES - MARK_BYTES
        self._map[MARK_BYTES:] = text.encode(errors="replace")[:size].ljust(size)

    def last(self) -> Beat | None:
        """Return this rank's last mark, or None if it did not fit."""
        return _parse(self._map[:])

    def close(self) -> None:
        """Mark a clean end and release the file."""
        self.beat(-1, FINISHED)
        self._map.close()


@dataclass(frozen=True, slots=True)
class Beat:
    """The last mark of a rank; step -1 is outside training, and "finished" marks a clean end.

    `alive_ns` is the last sign of life, or 0. `waits_for` is empty if the rank works or if this is
    unknown. `moved_ns` is the last time at which it began an action, a wait, or work after a wait.
    """

    pid: int
    node: str
    step: int
    action: str
    time_ns: int
    alive_ns: int = 0
    waits_for: str = ""
    moved_ns: int = 0

    @property
    def seen_s(self) -> float:
        """The time of the last mark or sign of life."""
        return max(self.time_ns, self.alive_ns) / 1e9


def read_beat(path: Path) -> Beat | None:
    """Read the last mark of a rank, or return None if there is none yet."""
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        return None


def read_beats(run_folder: Path) -> dict[int, Beat]:
    """Read the last mark of every rank that left a readable one."""
    beats = {}
    for path in sorted((run_folder / "heartbeat").glob("rank*")):
        with contextlib.suppress(OSError, ValueError):
            beat = read_beat(path)
            if beat is not None:
                beats[int(path.name.removeprefix("rank"))] = beat
    return beats


def _parse(content: bytes) -> Beat | None:
    words = content[:MARK_BYTES].split()
    if len(words) != 5:
        return None
    pid, node, step, action, time_ns = words
    life = content[MARK_BYTES:SIZE_BYTES].decode(errors="replace").strip().split(" ", 2)
    begun_ns = int(time_ns)
    alive_ns = 0
    moved_ns = begun_ns
    if len(life) >= 2 and life[0].isdecimal() and life[1].isdecimal():
        alive_ns = int(life[0])
        moved_ns = max(begun_ns, int(life[1]))
    # a sign of life older than the mark describes the action before it
    waits_for = life[2] if len(life) == 3 and alive_ns >= begun_ns else ""
    return Beat(
        int(pid), node.decode(), int(step), action.decode(), begun_ns, alive_ns, waits_for, moved_ns
    )

"""The heartbeat: the action that a rank is in, in a small file that outlives the rank.

Its times are comparable between the ranks of a run, whose nodes' clocks may differ or be set
meanwhile: they are of the clock that rank 0 had at the start. Who is no rank must not compare them
with its own clock, and may see them change.
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
    """Return the time since the epoch by the clock that the ranks of a run share."""
    return time.monotonic_ns() + _clock_ns


def set_clock(time_ns: int) -> None:
    """Set that clock to the time that rank 0 has now."""
    global _clock_ns
    _clock_ns = time_ns - time.monotonic_ns()


class Heartbeat:
    """Marks step and action in a memory-mapped file, so that also a rank killed by SIGKILL leaves its last mark.

    After the mark comes a sign of life, which a thread of its own renews while the process runs,
    with what the rank waits for. A process that is stopped, or whose interpreter is held, leaves it
    old.
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
        """Mark that the process runs, what its own thread waits for (nothing while it works), and since when."""
        text = f"{now_ns()} {moved_ns} {waits_for}"
        size = SIZE_BYTES - MARK_BYTES
        self._map[MARK_BYTES:] = text.encode(errors="replace")[:size].ljust(size)

    def last(self) -> Beat | None:
        """Return this rank's own last mark; None where it did not fit."""
        return _parse(self._map[:])

    def close(self) -> None:
        """Mark a clean end and release the file."""
        self.beat(-1, FINISHED)
        self._map.close()


@dataclass(frozen=True, slots=True)
class Beat:
    """The last mark of a rank: step -1 is outside of training; action "finished" is a clean end.

    `alive_ns` is its last sign of life, or 0; `waits_for` what it waits for, empty while it works
    or if that is not known; `moved_ns` when it last began an action, or to wait or to work within
    one.
    """

    pid: int
    node: str
    step: int
    action: str
    time_ns: int
    alive_ns: int = 0
    waits_for: str = ""
    moved_ns: int = 0


def read_beat(path: Path) -> Beat | None:
    """Read the last mark of a rank; None where there is none yet."""
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        return None


def read_beats(run_folder: Path) -> dict[int, Beat]:
    """Read the last mark of every rank of a run that left a readable one."""
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
    moved_ns = 0
    if len(life) >= 2 and life[0].isdecimal() and life[1].isdecimal():
        alive_ns = int(life[0])
        moved_ns = int(life[1])
    # what was said of the mark before this one is over
    waits_for = life[2] if len(life) == 3 and alive_ns >= begun_ns else ""
    moved_ns = max(begun_ns, moved_ns)
    return Beat(
        int(pid), node.decode(), int(step), action.decode(), begun_ns, alive_ns, waits_for, moved_ns
    )

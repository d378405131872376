"""A request to save and stop that reaches the launching process: SIGUSR2, from SLURM before the end or from a user."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types
from datetime import UTC, datetime
from typing import Self

from gems.runs.folder import RunFolder
from gems.utils.atomic_io import write_json

BY_LAUNCHER = "launcher"


class StopRequest:
    """Notes SIGUSR2 while it is entered, and passes it on to the ranks through stop.json.

    Entered by another than the main thread it notes nothing, as Python allows no handlers there.
    """

    def __init__(self) -> None:
        self._is_noted = False
        self._is_passed_on = False
        self._before: object = None
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)  # type: ignore[arg-type]

    @property
    def is_noted(self) -> bool:
        """Whether the signal has come."""
        return self._is_noted

    def pass_on(self, folder: RunFolder) -> None:
        """Write stop.json once the signal has come; the ranks stop at the end of a step."""
        if not self._is_noted or self._is_passed_on:
            return
        with contextlib.suppress(OSError):  # the file system may be back at the next call
            write_json(folder.stop_json, {
                "reason": signal.SIGUSR2.name, "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "by": f"{BY_LAUNCHER} {os.getpid()} on {os.uname().nodename}",
            })  # fmt: skip
            self._is_passed_on = True

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._is_noted = True

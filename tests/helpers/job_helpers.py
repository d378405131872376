"""What the tests of jobs share beside fixtures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait for a condition; fails the test when it does not come true."""
    pause = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        pause.wait(0.02)

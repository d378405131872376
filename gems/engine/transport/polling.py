"""Waiting that lets messages move and leaves the core to others."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterator

from gems.errors import StalledError

POLL_S = 0.000025  # poll interval of one rank that has a core to itself
MIN_POLL_S = 0.00005
# a wait for a time polls less often: an earlier message changes nothing for it
TIMED_WAIT_FACTOR = 8
SPIN_MARGIN_S = 0.00008  # spin this long before that time, since sleeps end late on busy cores
CROWDED_POLL_S = 0.0001  # from this interval on, spin less, to leave the cores to other ranks
TIMER_SLACK_NS = 1_000
SPIN_S = 0.0002
OWN_CORE_SPIN_S = 0.02
MIN_EXTENSION_S = 1.0
MAX_EXTENSION_S = 30.0
_PR_SET_TIMERSLACK = 29


class WaitState:
    """The message or event that this rank waits for now.

    The waiting code writes it, and the rank's watchdog reads it.

    Attributes:
        what: None while the rank works. It stays set after a wait that failed, since the rank still
            waits then.
        count: The number of waits that have begun.
        is_progressing: Called when a wait has timed out; returns whether a rank that this one
            depends on has begun anything in time.
        progress_mpi: Called before each sleep; lets messages of MPI move that no wait polls for.
    """

    __slots__ = ("count", "is_progressing", "progress_mpi", "what")

    def __init__(self) -> None:
        self.what: object = None
        self.count = 0
        self.is_progressing: Callable[[], bool] = lambda: False
        self.progress_mpi: Callable[[], object] = lambda: None

    def wait_until(
        self,
        is_done: Callable[[], object],
        what: object,
        hang_timeout_s: float,
        sleep_s: float,
        spin_s: float = 0.0,
        who: str = "",
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Wait until `is_done` returns true.

        Spin for `spin_s`, then `sleep` for `sleep_s` between calls.

        Raises:
            StalledError: It did not return true within the hang timeout, and no rank that this one
                depends on makes progress.
        """
        begin_s = time.perf_counter()
        spin_until_s = begin_s + spin_s
        deadline_s = begin_s + hang_timeout_s
        self.count += 1
        self.what = what
        while not is_done():
            now_s = time.perf_counter()
            if now_s > deadline_s:
                if not self.is_progressing():
                    raise StalledError(
                        f"{who}waited {max(hang_timeout_s, math.floor(now_s - begin_s)):g} s for"
                        f" {what}"
                    )
                deadline_s = time.perf_counter() + min(
                    max(hang_timeout_s / 10, MIN_EXTENSION_S), MAX_EXTENSION_S
                )
            if now_s > spin_until_s:
                self.progress_mpi()
                sleep(sleep_s)
        self.what = None


class Waiter:
    """Waits for times and conditions, polling for messages between short sleeps."""

    def __init__(
        self,
        poll: Callable[[], None],
        poll_interval_s: float,
        hang_timeout_s: float,
        wait_state: WaitState | None = None,
    ) -> None:
        self._poll = poll
        self._poll_interval_s = poll_interval_s
        share = min(1.0, CROWDED_POLL_S / poll_interval_s) if poll_interval_s else 1.0
        self._spin_margin_s = SPIN_MARGIN_S * share
        self._hang_timeout_s = hang_timeout_s
        self._wait_state = wait_state or WaitState()

    def wait_until_time(self, time_ns: int) -> None:
        """Wait until the host's monotonic clock has reached `time_ns`."""
        while True:
            self._poll()
            left_s = (time_ns - time.perf_counter_ns()) * 1e-9
            if left_s <= 0:
                return
            if left_s > self._spin_margin_s:
                time.sleep(
                    min(left_s - self._spin_margin_s, TIMED_WAIT_FACTOR * self._poll_interval_s)
                )

    def wait_until(self, is_done: Callable[[], bool], what: object) -> None:
        """Wait until `is_done` returns True; see `WaitState.wait_until`."""

        def is_done_after_poll() -> bool:
            if is_done():
                return True
            self._poll()
            return is_done()

        self._wait_state.wait_until(
            is_done_after_poll, what, self._hang_timeout_s, self._poll_interval_s
        )


def poll_interval_s(num_ranks_here: int) -> float:
    """Return how long a rank that waits for a message sleeps between polls.

    It grows with the ranks per core, so that all polls together cost a constant share of the cores.
    """
    return max(MIN_POLL_S, POLL_S * num_ranks_here / _num_cores())


def spin_time_s(num_ranks_here: int, is_on_gpu: bool) -> float:
    """Return how long a rank that waits for a message spins before it sleeps.

    The time is long if the rank has a core to itself and computes on a GPU. A rank that spins slows
    others that compute on processors: they share caches, power and often cores.
    """
    return OWN_CORE_SPIN_S if is_on_gpu and num_ranks_here <= _num_cores() else SPIN_S


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reduce_timer_slack() -> None:
    """Make Linux end sleeps on time (by default up to 50 us late); do nothing elsewhere."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)


@contextlib.contextmanager
def realtime_priority() -> Iterator[None]:
    """Run this thread before others inside the block, if the user may (root on Linux).

    Otherwise change nothing. An emulated rank that wakes up on a busy core would wait milliseconds
    for its turn, unlike a device. There must be no spinning inside the block.
    """
    try:
        before = os.sched_getscheduler(0)
        os.sched_setscheduler(
            0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
        )
    except (OSError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))

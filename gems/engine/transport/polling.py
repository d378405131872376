"""Patience: waiting that lets messages move and leaves the core to others."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterator

from gems.errors import StalledError

LOOK_S = 0.000025
LOOK_LEAST_S = 0.00005
LAX = 8
MARGIN_S = 0.00008
FEW_LOOK_S = 0.0001  # with more ranks a core than make for this, spinning would take the cores from the others
TIMER_SLACK_NS = 1_000
SPIN_S, OWN_CORE_SPIN_S = 0.0002, 0.02
AGAIN_LEAST_S, AGAIN_MOST_S = 1.0, 30.0
_PR_SET_TIMERSLACK = 29


class Waiting:
    """What this rank waits for now, None while it works: told by who waits, read by the rank's watchdog.

    `still_moves` is asked when a wait has come to its limit: whether a rank at the other end, or one that this one waits
    for in turn, has begun something within the limit, so that waiting on makes sense. Nobody knows unless a watchdog does.
    """

    __slots__ = ("count", "still_moves", "what")

    def __init__(self) -> None:
        self.what: object = None
        self.count = 0  # of the waits that have begun
        self.still_moves: Callable[[], bool] = _unknown

    def begin(self, what: object) -> None:
        """Record that this rank waits; `what` is to be None again when it has what it waited for."""
        self.count += 1
        self.what = what

    def more_s(self, begin_s: float, hang_timeout_s: float, what: object, who: str = "") -> float:
        """Return how many seconds more a wait for `what` is worth that began at `begin_s` and has come to its limit.

        Raises:
            StalledError: none.
        """
        if not self.still_moves():
            waited_s = max(hang_timeout_s, math.floor(time.perf_counter() - begin_s))
            raise StalledError(f"{who}waited {waited_s:g} s for {what}")
        return min(max(hang_timeout_s / 10, AGAIN_LEAST_S), AGAIN_MOST_S)


def _unknown() -> bool:
    return False


WAITING = Waiting()


class Patience:
    """Waits for times and conditions, with a look at the messages (`poll`) between short sleeps.

    Who waits for a message looks every `look_s`; who waits for a time looks less often, since a message that comes
    earlier changes nothing for it, and spins for the last moment, since a sleep ends late where cores are busy.
    """

    def __init__(self, poll: Callable[[], None], look_s: float, hang_timeout_s: float) -> None:
        self._poll = poll
        self._look_s = look_s
        self._margin_s = min(MARGIN_S, MARGIN_S * FEW_LOOK_S / look_s) if look_s else MARGIN_S
        self._stall_limit_s = hang_timeout_s

    def until(self, time_ns: int) -> None:
        """Wait until the host's monotonic clock says `time_ns`; does not return before."""
        while True:
            self._poll()
            left_s = (time_ns - time.perf_counter_ns()) * 1e-9
            if left_s <= 0:
                return
            if left_s > self._margin_s:
                time.sleep(min(left_s - self._margin_s, LAX * self._look_s))

    def for_(self, is_done: Callable[[], bool], what: object) -> None:
        """Wait until `is_done` says so.

        Raises:
            StalledError: it did not within the stall limit, and nobody that it hangs on moves.
        """
        begin_s = time.perf_counter()
        deadline_s = begin_s + self._stall_limit_s
        WAITING.begin(what)
        while not is_done():
            self._poll()
            if is_done():
                break
            if time.perf_counter() > deadline_s:
                more_s = WAITING.more_s(begin_s, self._stall_limit_s, what)
                deadline_s = time.perf_counter() + more_s
            time.sleep(self._look_s)
        WAITING.what = None  # and not where the wait has failed: then the rank stands there still


def look_s(num_ranks_here: int) -> float:
    """Return how long a rank that waits for a message may sleep between looks.

    Longer where many share a core: all looks together cost a share of the cores that does not grow with the ranks.
    """
    return max(LOOK_LEAST_S, LOOK_S * num_ranks_here / _num_cores())


def spin_of(num_ranks_here: int) -> float:
    """Return how long a rank that waits for a message spins before it sleeps: long where it has a core to itself."""
    return OWN_CORE_SPIN_S if num_ranks_here <= _num_cores() else SPIN_S


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sharpen_sleep() -> None:
    """Ask Linux to end sleeps on time: by default it adds up to 50 us to each. Elsewhere nothing happens."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)


@contextlib.contextmanager
def promptly() -> Iterator[None]:
    """Let this thread run before others for a while, where the user may (as root on Linux); otherwise changes nothing.

    On a busy core a rank that wakes up waits milliseconds for its turn, which no device would. It sleeps nearly all
    the time, so the others lose little; but inside there must be no waiting that spins.
    """
    try:
        before = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except (OSError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))

"""Links: what carries the messages of a schedule, and how a rank waits for them.

Needs neither MPI nor torch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from gems.engine.transport.polling import SPIN_S, WaitState

SLEEP_S = 0.00005
# each sleep of a wait is this much longer than the one before, so a message is seen late by at most
# an eighth of its wait
SLEEP_GROWTH = 1.125
LONGEST_GROWN_S = 0.0002


class Request(Protocol):
    """A message under way."""

    def Test(self) -> bool:  # noqa: N802, as mpi4py
        """Return whether the message is over, and let messages move."""


class Sums(Protocol):
    """Sums a contiguous tensor over `size` ranks in place.

    If it `sums_on_device`, the tensor may be on a GPU. All ranks post the same sums in the same
    order.
    """

    size: int
    sums_on_device: bool

    def post_sum(self, tensor: Any, /) -> Request:
        """Post a sum; the tensor may not be used until `wait_sum` for the request has returned."""

    def wait_sum(self, request: Any, /) -> None:
        """Wait for a posted sum."""

    def sum_in_place(self, tensor: Any, /) -> None:
        """Sum a tensor; collective."""

    def close(self) -> None:
        """Release the opened resources; collective."""


class Links(ABC):
    """Posts sends and receives of contiguous tensors to other ranks by number, and waits for them.

    Posting returns at once. A wait spins for `spin_s`, then sleeps between polls, for `sleep_s` at
    first, and is recorded in `wait_state`.

    Attributes:
        max_tag: the largest tag of a message.
    """

    max_tag: int

    def __init__(
        self,
        rank: int,
        hang_timeout_s: float,
        spin_s: float = SPIN_S,
        sleep_s: float = SLEEP_S,
        wait_state: WaitState | None = None,
    ) -> None:
        self.rank = rank
        self._hang_timeout_s = hang_timeout_s
        self._spin_s = spin_s
        self._sleep_s = sleep_s
        self._wait_state = wait_state or WaitState()
        self._outgoing: list[tuple[Request, Any, Callable[[], None] | None]] = []
        self._incoming: list[tuple[Request, Any]] = []

    @abstractmethod
    def send(
        self, tensor: Any, rank: int, tag: int, done: Callable[[], None] | None = None
    ) -> None:
        """Post a send; keep the tensor until it has left, then call `done`."""

    @abstractmethod
    def receive(self, tensor: Any, rank: int, tag: int) -> Request:
        """Post a receive into a tensor, which may be read after `wait` for the request."""

    @abstractmethod
    def close(self) -> None:
        """Release the opened resources; collective, when nothing is under way."""

    def poll(self) -> None:
        """Let messages move, and drop the sent ones; cheap if nothing is under way."""
        if self._outgoing:
            pending = []
            for entry in self._outgoing:
                if entry[0].Test():
                    if entry[2] is not None:
                        entry[2]()
                else:
                    pending.append(entry)
            self._outgoing = pending
        elif (
            self._incoming and self._incoming[0][0].Test()
        ):  # one test of a pending request progresses all
            del self._incoming[0]

    def is_complete(self, request: Request) -> bool:
        """Return whether a receive is over, without waiting for it."""
        return bool(request.Test())

    def wait(
        self, request: Request, what: object = "data", meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Wait for one request, and call `meanwhile` between polls; see `wait_until`.

        Raises:
            StalledError: nothing came within the hang timeout.
        """
        if not request.Test():
            self.wait_until(request.Test, what, meanwhile)
        # by identity: complete requests compare equal
        self._incoming = [entry for entry in self._incoming if entry[0] is not request]

    def drain(self) -> None:
        """Wait until all sends have left.

        Raises:
            StalledError: They did not leave within the hang timeout.
        """
        if self._outgoing:
            self.wait_until(lambda: not self._outgoing, "sends to leave")

    def wait_until(
        self,
        is_done: Callable[[], object],
        what: object,
        meanwhile: Callable[[], None] | None = None,
        sleep_s: float | None = None,
    ) -> None:
        """Wait until `is_done`, and call `meanwhile` before each check.

        The wait spins first, and then sleeps between polls, so that ranks may share a core. Short
        sleeps grow.

        Raises:
            StalledError: Nothing came within the hang timeout.
        """
        pause_s = sleep_s or self._sleep_s
        longest_s = max(pause_s, LONGEST_GROWN_S)

        def pause(seconds: float) -> None:
            nonlocal pause_s
            self._sleep(pause_s)
            pause_s = min(SLEEP_GROWTH * pause_s, longest_s)

        def is_done_after_poll() -> object:
            if meanwhile is not None:
                meanwhile()
            if self._outgoing:
                self.poll()
            return is_done()

        self._wait_state.wait_until(
            is_done_after_poll,
            what,
            self._hang_timeout_s,
            pause_s,
            self._spin_s,
            f"rank {self.rank} ",
            pause,
        )

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _keep_sent(self, request: Request, tensor: Any, done: Callable[[], None] | None) -> None:
        self._outgoing.append((request, tensor, done))

    def _keep_received(self, request: Request, tensor: Any) -> None:
        self._incoming.append((request, tensor))

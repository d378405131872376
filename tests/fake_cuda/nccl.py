"""A process group as NCCL's, on the fake device.

Messages follow the stream, and gloo moves their bytes.
A message is a copy on the group's stream to or from pinned memory, so that the device's clocks see
who is too early.
"""

from __future__ import annotations

import datetime
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_GROUPS: weakref.WeakSet[ProcessGroupNCCL] = weakref.WeakSet()
_ADVANCING = threading.Lock()


@functools.cache
def _gloo_device() -> Any:
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


class Options:
    """As ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._timeout: Any = None


class Moving(Protocol):
    """What gloo does with a message."""

    def Test(self) -> bool:
        """Return whether it is over."""


class Sum:
    """A sum by gloo, under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def Test(self) -> bool:
        return bool(self._work.is_completed())


class Work:
    """A message: copied out, moved by gloo, and copied in, as far as each is needed."""

    def __init__(
        self,
        group: ProcessGroupNCCL,
        tensor: Tensor,
        reads: bool,
        writes: bool,
        move: Callable[[Tensor], Moving],
    ) -> None:
        self._group = group
        self._tensor = tensor
        self._writes = writes
        self._move = move
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._moving: Moving | None = None
        self._done: torch.cuda.Event | None = None
        group.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(group.stream):
            if reads:
                self._host.copy_(tensor, non_blocking=True)
            self._ready = group.stream.record_event()

    def advance(self) -> bool:
        """Do what can be done, and return whether the next message may begin."""
        if self._moving is None:
            if not self._ready.query():
                return False
            self._moving = self._move(self._host)
        if self._done is None:
            if not self._moving.Test():
                return False
            with torch.cuda.stream(self._group.stream):
                if self._writes:
                    self._tensor.copy_(self._host, non_blocking=True)
                self._done = self._group.stream.record_event()
        return True

    def is_completed(self) -> bool:
        advance()
        return self._done is not None and self._done.query()

    def wait(self) -> bool:
        """Let the current stream wait.

        The host does so here only while the bytes are not on their way.
        """
        while self._done is None:
            self.is_completed()
        torch.cuda.current_stream().wait_event(self._done)
        return True


class ProcessGroupNCCL:
    """As torch.distributed.ProcessGroupNCCL: one stream, and messages in the order of posting."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        from gems.engine.transport.nccl_gloo import _Edge

        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = datetime.timedelta(days=1)
        gloo._devices = [_gloo_device()]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, gloo)
        self._edge = _Edge(self._gloo, True, threading.Event())
        self._under_way: deque[Work] = deque()
        self._is_connected = False
        self.stream = torch.cuda.Stream()
        with _ADVANCING:
            _GROUPS.add(self)

    def size(self) -> int:
        return int(self._gloo.size())

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        return self._post(Work(self, tensors[0], True, False, self._edge.send))

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        return self._post(Work(self, tensors[0], False, True, self._edge.receive))

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        return self._post(
            Work(self, tensors[0], True, True, lambda host: Sum(self._gloo.allreduce([host])))
        )

    def shutdown(self) -> None:
        self._edge.close()
        self._gloo = None

    def advance(self) -> None:
        """Go on with the messages that are under way, in their order."""
        while self._under_way and self._under_way[0].advance():
            self._under_way.popleft()

    def _post(self, work: Work) -> Work:
        if not self._is_connected:  # which NCCL does when all ranks have posted their first message
            self._gloo.barrier().wait()
            self._is_connected = True
        self._under_way.append(work)
        advance()
        return work


def advance() -> None:
    """Go on with all messages, as the device does whatever the host waits for.

    One thread at a time does.
    """
    if _ADVANCING.acquire(blocking=False):
        try:
            for group in list(_GROUPS):
                group.advance()
        finally:
            _ADVANCING.release()


def install() -> None:
    """Make torch.distributed have NCCL."""
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc, assignment]
    dist.is_nccl_available = lambda: True

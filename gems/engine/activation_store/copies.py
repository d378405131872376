"""Copies between the device and host memory: posted beside compute, and waited for by the stream that needs them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage


@dataclass(slots=True, eq=False)
class Copy:
    """A copy of one or several storages one way, from its posting on.

    `start` and `end` stamp it on its stream (nanoseconds on a processor). `memory` is the device memory that it reads
    or writes, which must not be used for anything else until the compute stream has waited for it; then it is let go.
    """

    start: Any
    end: Any
    num_bytes: int
    memory: tuple[UntypedStorage, ...] = ()
    is_waited_for: bool = False


class Copies(Protocol):
    """Moves storages out of the device and back. Only called with the stream of the layers' compute as the current one."""

    def out(self, pairs: Sequence[tuple[UntypedStorage, Tensor]]) -> Copy:
        """Post copies of storages to host buffers, behind the compute that was posted before."""

    def back(self, pairs: Sequence[tuple[Tensor, int]]) -> tuple[Copy, list[UntypedStorage]]:
        """Allocate storages on the device, and posts the copies of host buffers' first bytes to them."""

    def wait(self, copy: Copy) -> None:
        """Let the compute that is posted from now on wait for a copy. The host does not wait."""

    def is_over(self, copy: Copy) -> bool:
        """Whether a copy has ended."""

    def settle(self) -> None:
        """Wait, on the host, until all copies have ended."""


class ArenaCopies:
    """On a processor the host's memory is a second arena, and a copy is done when it is posted."""

    def out(self, pairs: Sequence[tuple[UntypedStorage, Tensor]]) -> Copy:
        """Copy storages to host buffers."""
        start = time.perf_counter_ns()
        for storage, buffer in pairs:
            buffer[: storage.nbytes()].copy_(bytes_of(storage))
        return Copy(start, time.perf_counter_ns(), _num_bytes(storage for storage, _ in pairs))

    def back(self, pairs: Sequence[tuple[Tensor, int]]) -> tuple[Copy, list[UntypedStorage]]:
        """Copy host buffers to new storages."""
        start = time.perf_counter_ns()
        made = [buffer[:num_bytes].clone().untyped_storage() for buffer, num_bytes in pairs]
        return Copy(start, time.perf_counter_ns(), _num_bytes(made)), made

    def wait(self, copy: Copy) -> None:
        """Has nothing to wait for."""
        copy.is_waited_for = True

    def is_over(self, copy: Copy) -> bool:
        """Report yes."""
        return True

    def settle(self) -> None:
        """Has nothing to wait for."""


class CudaCopies:
    """On a GPU a stream each way, so that both of its copy engines work at once.

    Memory belongs to the compute stream all its life: it is allocated there, and freed only once that stream waits for
    the end of the copy. So it is used again in the order of the list, with no mark left in torch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def out(self, pairs: Sequence[tuple[UntypedStorage, Tensor]]) -> Copy:
        """Post copies to pinned buffers."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        start, end = self._event(), self._event()
        start.record(self._out)
        with torch.cuda.stream(self._out):
            for storage, buffer in pairs:
                buffer[: storage.nbytes()].copy_(bytes_of(storage), non_blocking=True)
        end.record(self._out)
        memory = tuple(storage for storage, _ in pairs)
        return Copy(start, end, _num_bytes(memory), memory)

    def back(self, pairs: Sequence[tuple[Tensor, int]]) -> tuple[Copy, list[UntypedStorage]]:
        """Post copies from pinned buffers."""
        fresh = [torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _, num_bytes in pairs]
        # the memory may have been another tensor's, which compute posted before still reads
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        start, end = self._event(), self._event()
        start.record(self._in)
        with torch.cuda.stream(self._in):
            for tensor, (buffer, num_bytes) in zip(fresh, pairs, strict=True):
                tensor.copy_(buffer[:num_bytes], non_blocking=True)
        end.record(self._in)
        made = [tensor.untyped_storage() for tensor in fresh]
        return Copy(start, end, _num_bytes(made), tuple(made)), made

    def wait(self, copy: Copy) -> None:
        """Let the current stream wait for the copy's end."""
        torch.cuda.current_stream(self._device).wait_event(copy.end)
        copy.memory, copy.is_waited_for = (), True

    def is_over(self, copy: Copy) -> bool:
        """Ask the device."""
        return bool(copy.end.query())

    def settle(self) -> None:
        """Wait for both streams."""
        self._out.synchronize()
        self._in.synchronize()

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def open_copies(device: torch.device) -> Copies:
    """Choose how a device's memory is copied."""
    return CudaCopies(device) if device.type == "cuda" else ArenaCopies()


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return all of a storage as a row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _num_bytes(storages: Iterable[UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)

"""Copies between device and host memory, posted beside compute; the stream that needs one waits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from gems.autograd.storages import tensor_over
from gems.autograd.torch_internals import copy_all


@dataclass(slots=True, eq=False)
class Copy:
    """A posted copy of one or more tensors in one direction.

    `start` and `end` are timestamps on its stream (nanoseconds on a CPU, events on a GPU).
    """

    start: Any
    end: Any
    num_bytes: int
    # Device memory that it reads or writes; must not be used otherwise until the compute stream has
    # waited for it.
    memory: tuple[Tensor, ...] = ()
    is_waited_for: bool = False


class CpuCopier:
    """Copies at once to other memory of the process, which stands for the host's."""

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copy:
        """Copy tensors of the device to others on the host."""
        start = time.perf_counter_ns()
        targets = [on_host for _, on_host in pairs]
        copy_all(targets, [tensor for tensor, _ in pairs])
        return _ended(start, targets)

    def copy_in(self, on_host: Sequence[Tensor]) -> tuple[Copy, list[Tensor]]:
        """Copy tensors of the host to new ones of version 0 on the device."""
        start = time.perf_counter_ns()
        copies = [tensor.clone() for tensor in on_host]
        return _ended(start, copies), copies

    def wait(self, copy: Copy) -> None:
        """Do nothing."""

    def is_done(self, copy: Copy) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""


class CudaCopier:
    """Copies on one stream for each direction, so that both copy engines of a GPU work at once.

    All memory is allocated and freed on the compute stream, which waits for the end of a copy
    before memory is freed; so the allocator may reuse it in program order without `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copy:
        """Post copies of tensors to pinned ones, after the compute that was posted before."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        start = self._event()
        end = self._event()
        start.record(self._out)
        with torch.cuda.stream(self._out):
            for tensor, on_host in pairs:
                on_host.copy_(tensor, non_blocking=True)
        end.record(self._out)
        memory = tuple(tensor for tensor, _ in pairs)
        return Copy(start, end, _num_bytes(memory), memory)

    def copy_in(self, on_host: Sequence[Tensor]) -> tuple[Copy, list[Tensor]]:
        """Allocate tensors of version 0 on the device and post copies of pinned ones to them."""
        fresh = [torch.empty_like(tensor, device=self._device) for tensor in on_host]
        # the new memory may have been another tensor's, which compute posted before still reads
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        start = self._event()
        end = self._event()
        start.record(self._in)
        with torch.cuda.stream(self._in):
            for tensor, source in zip(fresh, on_host, strict=True):
                tensor.copy_(source, non_blocking=True)
        end.record(self._in)
        return Copy(start, end, _num_bytes(fresh), tuple(fresh)), [tensor.data for tensor in fresh]

    def wait(self, copy: Copy) -> None:
        """Make compute that is posted from now on wait for the copy; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(copy.end)
        copy.memory = ()
        copy.is_waited_for = True

    def is_done(self, copy: Copy) -> bool:
        """Return whether the end of the copy has been reached."""
        return bool(copy.end.query())

    def synchronize(self) -> None:
        """Block the host until all copies have ended."""
        self._out.synchronize()
        self._in.synchronize()

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Return a whole storage as a one-dimensional tensor of bytes."""
    return tensor_over(storage, torch.uint8, 0, (storage.nbytes(),), (1,))


def _ended(start_ns: int, copied: Sequence[Tensor]) -> Copy:
    return Copy(start_ns, time.perf_counter_ns(), _num_bytes(copied), is_waited_for=True)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])

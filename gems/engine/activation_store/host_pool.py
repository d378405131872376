"""A pool of host memory for what leaves the device: buffers of exact sizes, pinned for a GPU, and used again."""

from __future__ import annotations

import mmap
import resource
from typing import Any, Protocol

import torch
from torch import Tensor

from gems.errors import DoesNotFitError

PAGE_BYTES = mmap.PAGESIZE
ADVICE = "raise machine.host_bytes, or let less leave the device: another memory= policy, or more partitions"


class HostMemory(Protocol):
    """Gives host memory, and takes it back."""

    def make(self, num_bytes: int) -> Tensor:
        """Return a new buffer, a row of bytes."""

    def drop(self, buffer: Tensor) -> None:
        """Return a buffer back to the system."""


class PlainMemory:
    """The memory of the process, which serves as the host's where the device is a processor."""

    def make(self, num_bytes: int) -> Tensor:
        """Return a new buffer, a row of bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def drop(self, buffer: Tensor) -> None:
        """Leave the buffer to Python."""


class PinnedMemory:
    """Memory that a GPU copies to and from by itself: whole pages, registered with CUDA as they are.

    torch's own pinned allocator rounds sizes up to powers of two, of which up to half is never used.
    """

    def __init__(self, where: str, cudart: Any = None) -> None:
        self._where = where
        self._cudart = torch.cuda.cudart() if cudart is None else cudart  # type: ignore[no-untyped-call]
        self._pinned_bytes = 0

    def make(self, num_bytes: int) -> Tensor:
        """Return a new pinned buffer.

        Raises:
            DoesNotFitError: the system refuses to pin it.
        """
        size = _pages(num_bytes)
        buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8, count=num_bytes)
        error = self._cudart.cudaHostRegister(buffer.data_ptr(), size, 0)
        if int(error):
            limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            is_unlimited = limit_bytes == resource.RLIM_INFINITY
            raise DoesNotFitError(
                f"{self._where}: pinned host memory ({error})",
                self._pinned_bytes + num_bytes,
                self._pinned_bytes if is_unlimited else limit_bytes,
                "the system pins no more: raise `ulimit -l` (SLURM: PropagateResourceLimits), or the job's memory, "
                "or let less leave the device",
                "what may be pinned" if is_unlimited else "ulimit -l",
            )
        self._pinned_bytes += size
        return buffer

    def drop(self, buffer: Tensor) -> None:
        """Take the pins off; the pages go with the last reference to the buffer."""
        self._cudart.cudaHostUnregister(buffer.data_ptr())
        self._pinned_bytes -= _pages(buffer.nbytes)


class HostPool:
    """Buffers by size, made when they are first asked for: after the first step there is one for each copy.

    Making one takes milliseconds on a GPU's host, so none is given back to the system, but where the limit leaves no
    room for one of another size.
    """

    def __init__(self, memory: HostMemory, where: str, limit_bytes: int | None = None) -> None:
        """Begin empty.

        Args:
            memory: what buffers are made of.
            where: the rank, for an error's text.
            limit_bytes: the most of all buffers, used or not; None for no limit.
        """
        self.held_bytes = 0
        self.used_bytes = 0
        self.num_made = 0
        self._memory = memory
        self._where = where
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Tensor]] = {}

    def take(self, num_bytes: int) -> Tensor:
        """Return a row of bytes, of that size or, near the limit, a larger one.

        Raises:
            DoesNotFitError: the limit leaves no room for it.
        """
        size = num_bytes if self._free.get(num_bytes) or self._has_room(num_bytes) else self._other(num_bytes)
        free = self._free.get(size)
        buffer = free.pop() if free else self._make(size)
        self.used_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, for the next of its size."""
        self.used_bytes -= buffer.nbytes
        self._free.setdefault(buffer.nbytes, []).append(buffer)

    def _has_room(self, num_bytes: int) -> bool:
        return self._limit_bytes is None or self.held_bytes + num_bytes <= self._limit_bytes

    def _other(self, num_bytes: int) -> int:
        """Return the size to take instead of one there is no room for, and makes room if there is no such."""
        larger = [size for size, free in self._free.items() if free and size > num_bytes]
        if larger:
            return min(larger)
        for size in sorted(self._free):
            self._drop(size)
            if self._has_room(num_bytes):
                return num_bytes
        assert self._limit_bytes is not None
        raise DoesNotFitError(
            f"{self._where}: activations in host memory",
            self.used_bytes + num_bytes,
            self._limit_bytes,
            ADVICE,
            "its share of machine.host_bytes",
        )

    def _make(self, num_bytes: int) -> Tensor:
        buffer = self._memory.make(num_bytes)
        self.held_bytes += num_bytes
        self.num_made += 1
        return buffer

    def _drop(self, size: int) -> None:
        for buffer in self._free.pop(size, []):
            self._memory.drop(buffer)
            self.held_bytes -= size


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

"""A pool of host memory for offloaded tensors.

Buffers of exact sizes, pinned for a GPU, and reused.
"""

from __future__ import annotations

import mmap
import resource
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from gems.errors import DoesNotFitError

PAGE_BYTES = mmap.PAGESIZE
ADVICE = "raise machine.host_bytes, or offload less: another memory= policy, or more partitions"


class PinnedMemory:
    """Pinned memory in whole pages, registered with CUDA until it is freed or this object is gone.

    torch's own pinned allocator rounds sizes up to powers of two, of which up to half is never
    used.
    """

    def __init__(self, where: str, cudart: Any = None) -> None:
        self._where = where
        self._cudart = torch.cuda.cudart() if cudart is None else cudart  # type: ignore[no-untyped-call]
        self._pinned_bytes = 0
        # Pages must not be unmapped while they are registered: CUDA would refuse the next mapping
        # at their address.
        self._buffers: dict[int, Tensor] = {}
        weakref.finalize(self, _unregister, self._cudart, self._buffers).atexit = False

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a new pinned buffer.

        Raises:
            DoesNotFitError: The system refuses to pin it.
        """
        size = _whole_pages(num_bytes)
        buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8, count=num_bytes)
        error = self._cudart.cudaHostRegister(buffer.data_ptr(), size, 0)
        if int(error):
            limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            is_unlimited = limit_bytes == resource.RLIM_INFINITY
            raise DoesNotFitError(
                f"{self._where}: pinned host memory (CUDA's error {int(error)}: "
                f"{self._cudart.cudaGetErrorString(error)})",
                self._pinned_bytes + num_bytes,
                self._pinned_bytes if is_unlimited else limit_bytes,
                "the system pins no more: raise `ulimit -l` (SLURM: PropagateResourceLimits), or"
                " the job's memory, or offload less",
                "what may be pinned" if is_unlimited else "ulimit -l",
            )
        self._pinned_bytes += size
        self._buffers[buffer.data_ptr()] = buffer
        return buffer

    def free(self, buffer: Tensor) -> None:
        """Unpin the buffer; its pages are freed with the last reference to it."""
        address = buffer.data_ptr()
        self._cudart.cudaHostUnregister(address)
        self._pinned_bytes -= _whole_pages(self._buffers.pop(address).nbytes)


def _unregister(cudart: Any, buffers: dict[int, Tensor]) -> None:
    if buffers and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # copies may be under way
    for address in buffers:
        cudart.cudaHostUnregister(address)


class HostPool:
    """Reused buffers by size: after the first step there is one for each copy.

    Allocation takes milliseconds on a GPU's host, so a buffer is freed only if the limit leaves no
    room for one of another size.
    """

    def __init__(
        self, pinned: PinnedMemory | None, where: str, limit_bytes: int | None = None
    ) -> None:
        """Start with an empty pool.

        Without `pinned`, buffers are memory of the process, which stands for the host's. `where` is
        the rank, for the text of errors. `limit_bytes` limits all buffers together, used or not.
        """
        self.held_bytes = 0
        self.used_bytes = 0
        self.num_made = 0
        self._pinned = pinned
        self._where = where
        self._limit_bytes = limit_bytes
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def borrow(self, num_bytes: int) -> Tensor:
        """Return a buffer of that size or, near the limit, a larger one.

        It may be a tensor of any layout over its memory, as whoever released it has laid it out.

        Raises:
            DoesNotFitError: The limit leaves no room for it.
        """
        size = num_bytes
        free = self._free[size]
        if not free and not self._has_room(size):
            size = self._other_size(size)
            free = self._free[size]
        if free:
            buffer = free.pop()
        else:
            pinned = self._pinned
            buffer = (
                torch.empty(size, dtype=torch.uint8) if pinned is None else pinned.allocate(size)
            )
            self.held_bytes += size
            self.num_made += 1
        self.used_bytes += size
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back for reuse: what `borrow` returned, or a tensor over its memory."""
        size = buffer.untyped_storage().nbytes()
        self.used_bytes -= size
        self._free[size].append(buffer)

    def _has_room(self, num_bytes: int) -> bool:
        return self._limit_bytes is None or self.held_bytes + num_bytes <= self._limit_bytes

    def _other_size(self, num_bytes: int) -> int:
        """Return the size of a larger free buffer, or `num_bytes` after freeing smaller ones."""
        larger = [size for size, free in self._free.items() if free and size > num_bytes]
        if larger:
            return min(larger)
        for size in sorted(self._free):
            for buffer in self._free.pop(size):
                if self._pinned is not None:
                    self._pinned.free(buffer)
                self.held_bytes -= size
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


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

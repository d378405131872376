"""Staging: how a tensor gets between the device and the buffers that MPI reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gems.engine.transport.mpi import Comm, Transport, gpu_support
from gems.errors import ConfigError
from gems.models.build import TensorSpec

Done = Callable[[], None]


class Staging(Protocol):
    """Lends buffers for messages, and moves data between them and the device."""

    def borrow(self, spec: TensorSpec) -> torch.Tensor:
        """Return a contiguous buffer to receive into."""

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return what arrived in `buffer` as a tensor on the rank's device."""

    def to_host(self, tensor: torch.Tensor, done: Done) -> tuple[torch.Tensor, Done]:
        """Return a contiguous buffer with the tensor's data, ready to be sent, and what to call once it has left."""

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back tensors from `to_device` that nothing reads any more."""


class _Pool:
    """Reused buffers by shape and type: a fresh one of megabytes costs a page fault for each 4 KiB."""

    def __init__(self, allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        free = self._free.get((tuple(shape), dtype))
        return free.pop() if free else self._allocate(tuple(shape), dtype)

    def release(self, tensor: torch.Tensor) -> None:
        self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)


class Direct:
    """MPI reads and writes the device's own memory: always on a CPU, on a GPU if MPI supports it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = _Pool(lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))

    def borrow(self, spec: TensorSpec) -> torch.Tensor:
        """Return a buffer on the device."""
        self._synchronize()
        return self._pool.borrow(spec.shape, spec.dtype)

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffer itself."""
        return buffer

    def to_host(self, tensor: torch.Tensor, done: Done) -> tuple[torch.Tensor, Done]:
        """Return the tensor itself, made contiguous, once the device has computed it."""
        ready = tensor.detach().contiguous()
        self._synchronize()
        return ready, done

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the buffers for the next receive."""
        for tensor in tensors:
            self._pool.release(tensor.detach())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class HostStaged:
    """Data goes through pinned host memory, which works with every MPI."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = _Pool(lambda shape, dtype: torch.empty(shape, dtype=dtype, pin_memory=True))

    def borrow(self, spec: TensorSpec) -> torch.Tensor:
        """Return a pinned host buffer."""
        return self._pool.borrow(spec.shape, spec.dtype)

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Copy the buffer to the device, and release it."""
        tensor = buffer.to(self._device, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        self._pool.release(buffer)
        return tensor

    def to_host(self, tensor: torch.Tensor, done: Done) -> tuple[torch.Tensor, Done]:
        """Copy the tensor to a pinned buffer, which is released once it has left."""
        buffer = self._pool.borrow(tensor.shape, tensor.dtype)
        buffer.copy_(tensor.detach(), non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

        def release_then_done() -> None:
            self._pool.release(buffer)
            done()

        return buffer, release_then_done

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the device tensors to torch's allocator."""


def open_staging(wanted: str, device: torch.device, comm: Comm) -> Staging:
    """Return the staging of a device; collective over `comm`.

    Args:
        wanted: `host` stages through pinned memory, `gpu` gives MPI device pointers, `auto` does so if the library
            claims to take them and real messages arrive correctly on every rank.
        device: the rank's.
        comm: of all ranks.

    Raises:
        ConfigError: machine.transport=gpu, and the library or the test refuses it.
    """
    if device.type == "cpu":
        return Direct(device)
    works = wanted != "host" and all(comm.allgather(gpu_support())) and _self_test(device, comm)
    if wanted == "gpu" and not works:
        raise ConfigError(
            "machine.transport", "gpu", "this MPI did not pass the test with device memory",
            "use machine.transport=host",
        )  # fmt: skip
    return Direct(device) if works else HostStaged(device)


def _self_test(device: torch.device, comm: Comm) -> bool:
    """Send a pattern of device memory around the ranks once, and return whether it arrived on all of them."""
    transport = Transport(comm, hang_timeout_s=60.0)
    pattern = torch.arange(1 << 16, dtype=torch.int32, device=device)
    got = torch.zeros_like(pattern)
    mine = pattern + comm.rank
    torch.cuda.synchronize(device)
    request = transport.receive(got, (comm.rank - 1) % comm.size, 1)
    transport.send(mine, (comm.rank + 1) % comm.size, 1)
    transport.wait(request, "the test of device memory")
    transport.drain()
    is_right = bool(torch.equal(got, pattern + (comm.rank - 1) % comm.size))
    transport.close()
    return all(comm.allgather(is_right))

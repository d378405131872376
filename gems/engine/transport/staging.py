"""Staging: how a tensor gets between the device and the buffers that MPI reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gems.engine.transport.mpi import Comm, Transport, gpu_support
from gems.errors import ConfigError
from gems.models.build import TensorSpec

Done = Callable[[], None]
Key = tuple[tuple[int, ...], torch.dtype]


class Staging(Protocol):
    """Gives buffers for messages, and moves data between them and the device."""

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """Return a contiguous buffer to receive into."""

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return what arrived in `buffer` as a tensor on the rank's device."""

    def to_host(self, tensor: torch.Tensor, done: Done) -> tuple[torch.Tensor, Done]:
        """Return a contiguous buffer with the tensor's data, ready to be sent, and what to call once it has left."""

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors that `to_device` gave, when nothing reads them any more."""


class _Pool:
    """Buffers by shape and type, used again: a fresh one of megabytes costs a page fault for each 4 KiB."""

    def __init__(self, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        self._make = make
        self._free: dict[Key, list[torch.Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        free = self._free.get((tuple(shape), dtype))
        return free.pop() if free else self._make(tuple(shape), dtype)

    def give(self, tensor: torch.Tensor) -> None:
        self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)


class Direct:
    """MPI reads and writes the device's own memory: on a processor always, on a GPU where MPI supports it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = _Pool(lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """Return a buffer on the device."""
        self._settle()
        return self._pool.take(spec.shape, spec.dtype)

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffer itself."""
        return buffer

    def to_host(self, tensor: torch.Tensor, done: Done) -> tuple[torch.Tensor, Done]:
        """Return the tensor itself, made contiguous, once the device has computed it."""
        ready = tensor.detach().contiguous()
        self._settle()
        return ready, done

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the buffers back for the next receive."""
        for tensor in tensors:
            self._pool.give(tensor.detach())

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class HostStaged:
    """Data goes through pinned host memory: works with every MPI."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = _Pool(lambda shape, dtype: torch.empty(shape, dtype=dtype, pin_memory=True))

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """Return a pinned host buffer."""
        return self._pool.take(spec.shape, spec.dtype)

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Copy the buffer to the device; it may be used again at once."""
        tensor = buffer.to(self._device, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        self._pool.give(buffer)
        return tensor

    def to_host(self, tensor: torch.Tensor, done: Done) -> tuple[torch.Tensor, Done]:
        """Copy the tensor to a pinned buffer, which goes back to the pool once it has left."""
        buffer = self._pool.take(tensor.shape, tensor.dtype)
        buffer.copy_(tensor.detach(), non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

        def give_and_tell() -> None:
            self._pool.give(buffer)
            done()

        return buffer, give_and_tell

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the device tensors to torch's allocator."""


def open_staging(wanted: str, device: torch.device, comm: Comm) -> Staging:
    """Choose how data reaches MPI; collective over `comm`.

    `host` stages through pinned memory, `gpu` gives MPI device pointers, `auto` does so when the library claims to
    take them and a round of real messages comes back right on every rank.

    Raises:
        ConfigError: machine.transport=gpu where the library or the self-test says no.
    """
    if device.type == "cpu":
        return Direct(device)
    works = wanted != "host" and all(comm.allgather(gpu_support())) and _self_test(device, comm)
    if wanted == "gpu" and not works:
        raise ConfigError(
            "machine.transport",
            "gpu",
            "this MPI did not pass the test with device memory",
            "use machine.transport=host",
        )
    return Direct(device) if works else HostStaged(device)


def _self_test(device: torch.device, comm: Comm) -> bool:
    """Send a pattern of device memory once around the ranks and compares it."""
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

"""Staging: how a tensor gets between the device and the buffers that MPI reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gems.engine.transport.mpi import Comm, Transport, allgather, gpu_support
from gems.errors import ConfigError
from gems.models.build import TensorSpec

Done = Callable[[], None]


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


class Staging:
    """Lends buffers for messages, and moves data between them and the device.

    If `is_direct`, MPI reads and writes the device's own memory: always on a CPU, on a GPU if MPI supports it.
    Otherwise data goes through pinned host memory, which works with every MPI.
    """

    def __init__(self, device: torch.device, is_direct: bool = True) -> None:
        self.is_direct = is_direct
        self._device = device
        where: dict[str, Any] = {"device": device} if is_direct else {"pin_memory": True}
        self._pool = _Pool(lambda shape, dtype: torch.empty(shape, dtype=dtype, **where))

    def borrow(self, spec: TensorSpec) -> torch.Tensor:
        """Return a contiguous buffer to receive into."""
        if self.is_direct:
            self._synchronize()
        return self._pool.borrow(spec.shape, spec.dtype)

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return what arrived in `buffer` as a tensor on the rank's device; a pinned buffer is released."""
        if self.is_direct:
            return buffer
        tensor = buffer.to(self._device, non_blocking=True)
        self._synchronize()
        self._pool.release(buffer)
        return tensor

    def to_host(self, tensor: torch.Tensor, done: Done) -> tuple[torch.Tensor, Done]:
        """Return a contiguous buffer with the tensor's data, ready to be sent, and what to call once it has left."""
        if self.is_direct:
            ready = tensor.detach().contiguous()
            self._synchronize()
            return ready, done
        buffer = self._pool.borrow(tensor.shape, tensor.dtype)
        buffer.copy_(tensor.detach(), non_blocking=True)
        self._synchronize()

        def release_then_done() -> None:
            self._pool.release(buffer)
            done()

        return buffer, release_then_done

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back tensors from `to_device` that nothing reads any more, for the next receive."""
        for tensor in tensors if self.is_direct else ():  # the others are torch's allocator's
            self._pool.release(tensor.detach())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def open_staging(wanted: str, device: torch.device, comm: Comm) -> Staging:
    """Return the staging of a device; collective over `comm`, the communicator of all ranks.

    `host` stages through pinned memory, `gpu` gives MPI device pointers, `auto` does so if the library claims to take
    them and real messages arrive correctly on every rank.

    Raises:
        ConfigError: machine.transport=gpu, and the library or the test refuses it.
    """
    if device.type == "cpu":
        return Staging(device)
    works = wanted != "host" and all(allgather(comm, gpu_support())) and _self_test(device, comm)
    if wanted == "gpu" and not works:
        raise ConfigError(
            "machine.transport", "gpu", "this MPI did not pass the test with device memory",
            "use machine.transport=host",
        )  # fmt: skip
    return Staging(device, is_direct=works)


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
    return all(allgather(comm, is_right))

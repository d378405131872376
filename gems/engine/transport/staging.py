"""Staging: moves tensors between the device and the buffers that links read and write.

The host waits for no stream: each buffer has an event that says when links may use it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gems.autograd.torch_internals import set_allocator
from gems.config.cluster import NCCL
from gems.engine.device import Arrival, CopyIn
from gems.engine.transport.mpi import Comm, Transport, allgather, gpu_support
from gems.errors import ConfigError
from gems.models.build import TensorSpec
from gems.partition.links import STAGED_PIECE_BYTES

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Buffer:
    """Contiguous memory of a message.

    The links may use it once `event` has been reached. If it is not the device's own memory,
    `source` is the memory that it is copied from.
    """

    tensor: torch.Tensor
    event: torch.cuda.Event | None = None
    source: torch.Tensor | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether links may use the buffer now."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class Incoming:
    """A tensor that is received piece by piece, each piece in a buffer.

    `arrival` is the destination of the pieces if they are copied.
    """

    spec: TensorSpec
    buffers: list[Buffer]
    arrival: Arrival | None = None


class Staging:
    """Lends the device's own memory to MPI.

    The device is a CPU, or a GPU whose pointers MPI takes.
    """

    is_direct = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Buffer]] = {}

    def num_pieces(self, spec: TensorSpec) -> int:
        """Return the number of pieces in which a tensor travels."""
        return 1

    def receiving(self, spec: TensorSpec) -> Incoming:
        """Return buffers to receive a tensor into."""
        return Incoming(spec, [self._borrow(spec.shape, spec.dtype)])

    def bring(self, incoming: Incoming, place: int) -> None:
        """Begin to copy a piece that has arrived in a buffer to the device."""

    def received(self, incoming: Incoming) -> torch.Tensor:
        """Return a tensor for the current stream, after `bring` was called for all its pieces."""
        return incoming.buffers[0].tensor

    def sending(self, tensor: torch.Tensor) -> list[Buffer]:
        """Return buffers with the pieces of a tensor, ready to be sent."""
        return [Buffer(tensor.detach().contiguous(), self._now())]

    def sent(self, buffer: Buffer) -> None:
        """Take back a buffer that has left."""

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back received tensors that no work posted later reads, for the next receive."""
        for tensor in tensors:
            self._give_back(Buffer(tensor.detach(), self._now()))

    def _borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """Return a returned buffer, if possible one that is ready.

        A new buffer of megabytes would cost a page fault for each 4 KiB.
        """
        free = self._free.get((tuple(shape), dtype))
        if not free:
            return self._allocate(tuple(shape), dtype)
        return free.pop(next((place for place, buffer in enumerate(free) if buffer.is_ready), 0))

    def _give_back(self, buffer: Buffer) -> None:
        self._free.setdefault((tuple(buffer.tensor.shape), buffer.tensor.dtype), []).append(buffer)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        # torch's allocator may return memory that earlier posted work still reads
        return Buffer(torch.empty(shape, dtype=dtype, device=self._device), self._now())

    def _now(self) -> torch.cuda.Event | None:
        """Return an event after all work that is posted on the current stream."""
        if self._device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event


class StreamStaging(Staging):
    """Lends a GPU's memory to NCCL, which takes messages at once.

    The messages follow the work on the current stream.
    """

    def _now(self) -> None:
        return None


class HostStaging(Staging):
    """Stages a GPU's messages through pinned host memory, which all links take.

    The copies have their own streams. A tensor travels in pieces, so that one piece is copied while
    others are on the link.
    """

    is_direct = False

    def __init__(self, device: torch.device, piece_bytes: int = STAGED_PIECE_BYTES) -> None:
        super().__init__(device)
        self._piece_bytes = piece_bytes
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = CopyIn(device)

    def num_pieces(self, spec: TensorSpec) -> int:
        """Return the number of pieces in which a tensor travels."""
        return len(self._pieces(spec.shape, spec.dtype))

    def receiving(self, spec: TensorSpec) -> Incoming:
        """Return buffers to receive a tensor into."""
        return Incoming(
            spec,
            [self._borrow((size,), spec.dtype) for size in self._pieces(spec.shape, spec.dtype)],
        )

    def bring(self, incoming: Incoming, place: int) -> None:
        """Post the copy to the device of a piece that has arrived in a buffer."""
        buffer = incoming.buffers[place]
        first = (
            incoming.buffers[0].tensor.numel() + (place - 1) * buffer.tensor.numel() if place else 0
        )
        incoming.arrival = self._in.add_piece(
            buffer.tensor, first, incoming.spec.shape, incoming.arrival
        )
        buffer.event = incoming.arrival.event

    def received(self, incoming: Incoming) -> torch.Tensor:
        """Return the tensor that was brought and give back its buffers; the stream waits for it."""
        assert incoming.arrival is not None
        for buffer in incoming.buffers:
            self._give_back(buffer)
        return incoming.arrival.take()

    def sending(self, tensor: torch.Tensor) -> list[Buffer]:
        """Post the copies of a tensor's pieces to buffers, after the compute posted before."""
        source = tensor.detach().contiguous().view(-1)
        sizes = self._pieces(source.shape, source.dtype)
        buffers = [self._borrow((size,), source.dtype) for size in sizes]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        for buffer, piece in zip(buffers, torch.split(source, sizes), strict=True):
            if buffer.event is not None:
                self._out.wait_event(buffer.event)
            with torch.cuda.stream(self._out):
                buffer.source = piece  # keep it alive until the copy has ended
                buffer.tensor.copy_(piece, non_blocking=True)
                buffer.event = self._now()
        return buffers

    def _pieces(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the number of elements of each piece; the first may be smaller than the others."""
        size = math.prod(shape)
        most = max(1, self._piece_bytes // dtype.itemsize)
        rest = size % most
        return ([rest] if rest or not size else []) + [most] * (size // most)

    def sent(self, buffer: Buffer) -> None:
        """Give back a buffer that has left."""
        self._give_back(buffer)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: the tensors belong to torch's allocator."""

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        return Buffer(torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True))


def open_staging(wanted: str, device: torch.device, comm: Comm) -> Staging:
    """Return the staging of a device; collective over `comm`, the communicator of all ranks.

    With `mpi`, MPI gets device pointers. With `auto` it gets them too, if the library claims to
    take them and test messages arrive correctly on every rank. Otherwise messages go through pinned
    memory, as with `host` and `gloo`.

    Unless MPI gets device pointers, torch's allocator is then set to expand its segments, which
    ends most of its fragmentation. This is done by a call, because the allocator read its
    environment when the device was opened, before MPI could be asked. UCX cannot share such
    segments between the GPUs of a node. Settings of the user are kept.

    Raises:
        ConfigError: `machine.transport=mpi`, and the library or the test refuses device pointers.
    """
    if device.type == "cpu":
        return Staging(device)
    works = (
        wanted in ("auto", "mpi")
        and all(allgather(comm, gpu_support()))
        and _self_test(device, comm)
    )
    settings = next((value for name in ALLOCATOR_SETTINGS if (value := os.environ.get(name))), "")
    if works and EXPANDABLE.lower() in settings.lower() and comm.rank == 0:
        _log.warning(
            "expandable_segments in torch's allocator keeps UCX from copying between the GPUs of a"
            " node"
        )
    if not (works or settings or torch.version.hip):
        set_allocator(EXPANDABLE)
        os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE  # read by the advice on full memory
    if wanted == NCCL:
        return StreamStaging(device)
    if wanted == "mpi" and not works:
        raise ConfigError(
            "machine.transport",
            "mpi",
            "this MPI did not pass the test with device memory",
            "use machine.transport=nccl or host",
        )
    return Staging(device) if works else HostStaging(device)


def _self_test(device: torch.device, comm: Comm) -> bool:
    """Send a pattern from device memory around the ranks; return whether it arrived everywhere."""
    transport = Transport(comm, hang_timeout_s=60.0)
    pattern = torch.arange(1 << 16, dtype=torch.int32, device=device)
    received = torch.zeros_like(pattern)
    sent = pattern + comm.rank
    torch.cuda.synchronize(device)
    request = transport.receive(received, (comm.rank - 1) % comm.size, 1)
    transport.send(sent, (comm.rank + 1) % comm.size, 1)
    transport.wait(request, "the test of device memory")
    transport.drain()
    is_right = bool(torch.equal(received, pattern + (comm.rank - 1) % comm.size))
    transport.close()
    return all(allgather(comm, is_right))

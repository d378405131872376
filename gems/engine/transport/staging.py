"""Staging: how a tensor gets between the device and the buffers that links read and write.

The host waits for no stream: a buffer says by an event from when on links may use it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gems.autograd.torch_internals import set_allocator
from gems.config.schema import NCCL
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
    """Contiguous memory of a message, which is the device's, or the links' once an event has been reached.

    If that is other memory than the device's, `source` is what it is copied from.
    """

    tensor: torch.Tensor
    event: torch.cuda.Event | None = None
    source: torch.Tensor | None = None

    @property
    def is_ready(self) -> bool:
        """Whether links may use it now."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class Incoming:
    """A tensor that is received in buffers, each a piece of it.

    `arrival` is what they are copied to, if they are.
    """

    spec: TensorSpec
    buffers: list[Buffer]
    arrival: Arrival | None = None


class Staging:
    """Lends the device's own memory to MPI.

    That of a CPU, or that of a GPU whose pointers MPI takes.
    """

    is_direct = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Buffer]] = {}

    def num_pieces(self, spec: TensorSpec) -> int:
        """Return in how many pieces a tensor travels."""
        return 1

    def receiving(self, spec: TensorSpec) -> Incoming:
        """Return buffers to receive a tensor into."""
        return Incoming(spec, [self._borrow(spec.shape, spec.dtype)])

    def bring(self, incoming: Incoming, place: int) -> None:
        """Begin to bring the piece that has arrived in a buffer to the device."""

    def received(self, incoming: Incoming) -> torch.Tensor:
        """Return a tensor whose pieces `bring` was called for, for the current stream."""
        return incoming.buffers[0].tensor

    def sending(self, tensor: torch.Tensor) -> list[Buffer]:
        """Return buffers with the pieces of a tensor, to be sent."""
        return [Buffer(tensor.detach().contiguous(), self._now())]

    def sent(self, buffer: Buffer) -> None:
        """Take back a buffer that has left."""

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back received tensors that nothing reads any more after what is posted, for the next receive."""
        for tensor in tensors:
            self._give_back(Buffer(tensor.detach(), self._now()))

    def _borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """Return a buffer that was given back, if possible one that is ready.

        A fresh one of megabytes would cost a page fault for each 4 KiB.
        """
        free = self._free.get((tuple(shape), dtype))
        if not free:
            return self._allocate(tuple(shape), dtype)
        return free.pop(next((place for place, buffer in enumerate(free) if buffer.is_ready), 0))

    def _give_back(self, buffer: Buffer) -> None:
        self._free.setdefault((tuple(buffer.tensor.shape), buffer.tensor.dtype), []).append(buffer)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        # torch's allocator may give memory that work posted before still reads
        return Buffer(torch.empty(shape, dtype=dtype, device=self._device), self._now())

    def _now(self) -> torch.cuda.Event | None:
        """Return an event after what is posted on the current stream."""
        if self._device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event


class StreamStaging(Staging):
    """Lends a GPU's memory to NCCL, which takes messages at once.

    They follow the work on the current stream.
    """

    def _now(self) -> None:
        return None


class HostStaging(Staging):
    """Stages a GPU's messages through pinned host memory, which all links take.

    Copies have streams of their own.
    A tensor travels in pieces, so that one is copied while others are on the link.
    """

    is_direct = False

    def __init__(self, device: torch.device, piece_bytes: int = STAGED_PIECE_BYTES) -> None:
        super().__init__(device)
        self._piece_bytes = piece_bytes
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = CopyIn(device)

    def num_pieces(self, spec: TensorSpec) -> int:
        """Return in how many pieces a tensor travels."""
        return len(self._pieces(spec.shape, spec.dtype))

    def receiving(self, spec: TensorSpec) -> Incoming:
        """Return buffers to receive a tensor into."""
        return Incoming(
            spec,
            [self._borrow((size,), spec.dtype) for size in self._pieces(spec.shape, spec.dtype)],
        )

    def bring(self, incoming: Incoming, place: int) -> None:
        """Post the copy of the piece that has arrived in a buffer to the device."""
        buffer = incoming.buffers[place]
        first = (
            incoming.buffers[0].tensor.numel() + (place - 1) * buffer.tensor.numel() if place else 0
        )
        incoming.arrival = self._in.add_piece(
            buffer.tensor, first, incoming.spec.shape, incoming.arrival
        )
        buffer.event = incoming.arrival.event

    def received(self, incoming: Incoming) -> torch.Tensor:
        """Return what was brought; the current stream waits for it, and the buffers are given back."""
        assert incoming.arrival is not None
        for buffer in incoming.buffers:
            self._give_back(buffer)
        return incoming.arrival.take()

    def sending(self, tensor: torch.Tensor) -> list[Buffer]:
        """Post the copies of a tensor's pieces to buffers, after the compute that was posted before."""
        source = tensor.detach().contiguous().view(-1)
        sizes = self._pieces(source.shape, source.dtype)
        buffers = [self._borrow((size,), source.dtype) for size in sizes]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        for buffer, piece in zip(buffers, torch.split(source, sizes), strict=True):
            if buffer.event is not None:
                self._out.wait_event(buffer.event)
            with torch.cuda.stream(self._out):
                buffer.source = piece  # which is held until the copy has ended
                buffer.tensor.copy_(piece, non_blocking=True)
                buffer.event = self._now()
        return buffers

    def _pieces(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the elements of each piece, of which the first is the smallest, so that all others are alike."""
        size = math.prod(shape)
        most = max(1, self._piece_bytes // dtype.itemsize)
        rest = size % most
        return ([rest] if rest or not size else []) + [most] * (size // most)

    def sent(self, buffer: Buffer) -> None:
        """Give back a buffer that has left."""
        self._give_back(buffer)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: the tensors are torch's allocator's."""

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        return Buffer(torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True))


def open_staging(wanted: str, device: torch.device, comm: Comm) -> Staging:
    """Return the staging of a device; collective over `comm`, the communicator of all ranks.

    `mpi` gives MPI device pointers, and `auto` does so if the library claims to take them and real
    messages arrive correctly on every rank; else messages go through pinned memory, as with `host`
    and `gloo`.

    Unless MPI gets device pointers, torch's allocator then expands its segments, which ends most of
    its fragmentation. It does so by a call: its environment was read when the device was opened,
    before MPI could be asked. UCX cannot share such segments between the GPUs of a node. What the
    user has set stays.

    Raises:
        ConfigError: machine.transport=mpi, and the library or the test refuses device pointers.
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
        os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE  # the advice on full memory reads it
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

"""Point-to-point channels: the transfers of a schedule as messages between the ranks of one pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.message_tags import MessageTags
from gems.engine.transport.mpi import Comm, Transport
from gems.engine.transport.polling import SPIN_S, WaitState
from gems.engine.transport.staging import Staging
from gems.models.build import TensorSpec
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import boundary_of
from gems.schedule.schedule import Schedule

Boundary = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """What is the same for a transfer in every step."""

    transport: Transport
    peer: int
    specs: Boundary
    tags: Sequence[int]
    num_bytes: int


@dataclass(slots=True)
class _PostedReceive:
    tensors: list[torch.Tensor]
    requests: list[Any]
    posted_ns: int


class _SendCompletion:
    """Counts the tensors of a send that have left, and records the transfer after the last one."""

    __slots__ = ("_action", "_num_bytes", "_num_left", "_recorder", "posted_ns")

    def __init__(self, recorder: Recorder, action: Action, num_bytes: int, num_tensors: int) -> None:
        self._recorder, self._action, self._num_bytes, self._num_left = recorder, action, num_bytes, num_tensors
        self.posted_ns = 0

    def __call__(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._recorder.count_bytes(-self._num_bytes)
            self._recorder.transfer(self._action, self.posted_ns, self._num_bytes)


class P2PChannels:
    """Posts the sends and receives of one rank, and waits for data."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        boundaries: Sequence[Boundary],
        transports: Sequence[Transport],
        staging: Staging,
        recorder: Recorder,
    ) -> None:
        """Look up peers, tags and sizes, once for all steps.

        Args:
            schedule: lowered.
            rank: in the pipeline.
            boundaries: output tensors of each stage; gradients of those of a floating-point type travel back.
            transports: one per direction.
            staging: moves data between the device and MPI's buffers.
            recorder: gets bytes and events.

        Raises:
            ConfigError: this MPI has too few tags for the messages of a step.
        """
        self.schedule = schedule
        self._boundaries = boundaries
        self._transports = transports
        self._staging = staging
        self._recorder = recorder
        self._receives: dict[Action, _PostedReceive] = {}
        size = max((len(boundary) for boundary in boundaries), default=1)
        tags = MessageTags(schedule, size, transports[0].max_tag)
        self._transfers = {
            action: self._transfer(action, tags)
            for action in schedule.rows[rank]
            if action.kind in SEND_KINDS | RECV_KINDS
        }

    def _transfer(self, action: Action, tags: MessageTags) -> _Transfer:
        specs = self._boundaries[boundary_of(action)]
        if action.kind in (Kind.SEND_B, Kind.RECV_B):
            specs = with_gradient(specs)
        num_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        transport = self._transports[action.direction]
        return _Transfer(transport, tags.peer(action), specs, tags.tags(action, len(specs)), num_bytes)

    def post_receive(self, action: Action) -> None:
        """Post the buffers of a RECV_F or RECV_B."""
        transfer = self._transfers[action]
        posted_ns = self._recorder.now()
        buffers = [self._staging.borrow(spec) for spec in transfer.specs]
        receive, peer = transfer.transport.receive, transfer.peer
        requests = [receive(buffer, peer, tag) for buffer, tag in zip(buffers, transfer.tags, strict=True)]
        self._recorder.count_bytes(transfer.num_bytes)
        self._receives[action] = _PostedReceive(buffers, requests, posted_ns)

    def wait(self, action: Action) -> tuple[torch.Tensor, ...]:
        """Wait for a posted receive and return its tensors, on the rank's device.

        Raises:
            StalledError: nothing came within the hang timeout.
        """
        transfer, receive = self._transfers[action], self._receives.pop(action)
        for request in receive.requests:
            transfer.transport.wait(request, action)
        self._recorder.transfer(action, receive.posted_ns, transfer.num_bytes)
        return tuple(self._staging.to_device(buffer) for buffer in receive.tensors)

    def post_send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Post the tensors of a SEND_F or SEND_B; their memory is free again once they have left."""
        transfer = self._transfers[action]
        completion = _SendCompletion(self._recorder, action, transfer.num_bytes, len(tensors))
        self._recorder.count_bytes(transfer.num_bytes)
        ready = [self._staging.to_host(tensor, completion) for tensor in tensors]
        completion.posted_ns = self._recorder.now()  # on a GPU not before the tensors have been computed
        for (buffer, done), tag in zip(ready, transfer.tags, strict=True):
            transfer.transport.send(buffer, transfer.peer, tag, done)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Release received tensors that nothing reads any more."""
        self._recorder.count_bytes(-sum(tensor.nbytes for tensor in tensors))
        self._staging.release(tensors)

    def num_gradients(self, stage: int) -> int:
        """Return how many tensors the gradient of a stage's output has."""
        return len(with_gradient(self._boundaries[stage]))

    def poll(self) -> None:
        """Let messages move while the rank computes."""
        for transport in self._transports:
            transport.poll()

    def drain(self) -> None:
        """Wait for the last sends of a step."""
        for transport in self._transports:
            transport.drain()


def with_gradient(boundary: Boundary) -> Boundary:
    """Return the tensors of a boundary that have a gradient: those of a floating-point type."""
    return tuple(spec for spec in boundary if spec.dtype.is_floating_point)


def open_transports(
    pipeline: Comm,
    num_directions: int,
    hang_timeout_s: float,
    spin_s: float = SPIN_S,
    wait_state: WaitState | None = None,
) -> list[Transport]:
    """Open a transport, with a communicator of its own, for each direction; collective over the pipeline."""
    return [Transport(pipeline, hang_timeout_s, spin_s, wait_state=wait_state) for _ in range(num_directions)]

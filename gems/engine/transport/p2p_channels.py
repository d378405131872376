"""Point-to-point channels: the transfers of a schedule as messages between the ranks of one pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.message_tags import MessageTags
from gems.engine.transport.mpi import Transport
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

        `boundaries` are the output tensors of each stage, or of each strip of each stage in turn, which may be none;
        gradients of those of a floating-point type travel back. There is a transport for each direction.

        Raises:
            ConfigError: this MPI has too few tags for the messages of a step.
        """
        self._boundaries = boundaries
        self._transports = transports
        self._staging = staging
        self._recorder = recorder
        self._receives: dict[Action, tuple[list[torch.Tensor], list[Any], int]] = {}
        size = max((len(boundary) for boundary in boundaries), default=1)
        tags = MessageTags(schedule, size, transports[0].max_tag)
        self._transfers: dict[Action, _Transfer] = {}
        for action in schedule.rows[rank]:
            if action.kind in SEND_KINDS | RECV_KINDS:
                strip = (action.micro_batch or 0) % schedule.num_strips
                specs = boundaries[boundary_of(action) * schedule.num_strips + strip]
                if action.kind in (Kind.SEND_B, Kind.RECV_B):
                    specs = with_gradient(specs)
                num_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
                peer, numbers = tags.peer(action), tags.tags(action, len(specs))
                self._transfers[action] = _Transfer(transports[action.direction], peer, specs, numbers, num_bytes)

    def post_receive(self, action: Action) -> None:
        """Post the buffers of a RECV_F or RECV_B."""
        transfer = self._transfers[action]
        posted_ns = time.perf_counter_ns()
        buffers = [self._staging.borrow(spec) for spec in transfer.specs]
        receive, peer = transfer.transport.receive, transfer.peer
        requests = [receive(buffer, peer, tag) for buffer, tag in zip(buffers, transfer.tags, strict=True)]
        self._recorder.count_bytes(transfer.num_bytes)
        self._receives[action] = (buffers, requests, posted_ns)

    def wait(self, action: Action) -> tuple[torch.Tensor, ...]:
        """Wait for a posted receive and return its tensors, on the rank's device."""
        transfer, (buffers, requests, posted_ns) = self._transfers[action], self._receives.pop(action)
        for request in requests:
            transfer.transport.wait(request, action)
        self._recorder.transfer(action, posted_ns, transfer.num_bytes)
        return tuple(self._staging.to_device(buffer) for buffer in buffers)

    def post_send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Post the tensors of a SEND_F or SEND_B; their memory is free again once they have left."""
        transfer, num_left = self._transfers[action], len(tensors)

        def end() -> None:  # of one tensor; the last one ends the transfer
            nonlocal num_left
            num_left -= 1
            if not num_left:
                self._recorder.count_bytes(-transfer.num_bytes)
                self._recorder.transfer(action, posted_ns, transfer.num_bytes)

        self._recorder.count_bytes(transfer.num_bytes)
        ready = [self._staging.to_host(tensor, end) for tensor in tensors]
        posted_ns = time.perf_counter_ns()  # on a GPU not before the tensors have been computed
        for (buffer, done), tag in zip(ready, transfer.tags, strict=True):
            transfer.transport.send(buffer, transfer.peer, tag, done)
        if not ready:
            self._recorder.transfer(action, posted_ns, 0)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Release received tensors that nothing reads any more."""
        self.hand_over(tensors)
        self._staging.release(tensors)

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count received tensors no more; their memory is not received into again."""
        self._recorder.count_bytes(-sum(tensor.nbytes for tensor in tensors))

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

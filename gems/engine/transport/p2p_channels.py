"""Links: the transfers of a schedule, as messages between the ranks of one pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.message_tags import check_tags, first_index, most_tensors, peer_of, tag_of
from gems.engine.transport.mpi import Comm, Transport
from gems.engine.transport.polling import SPIN_S
from gems.engine.transport.staging import Staging
from gems.models.build import TensorSpec
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import boundary_of
from gems.schedule.schedule import Schedule

Boundary = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """What is the same for a transfer in every step."""

    transport: Transport
    peer: int
    boundary: Boundary
    tags: tuple[int, ...]
    num_bytes: int


@dataclass(slots=True)
class _Arrival:
    tensors: list[torch.Tensor]
    requests: list[Any]
    posted_ns: int


class _Departure:
    """Counts the tensors of a send that have left, and records the transfer when the last one has."""

    __slots__ = ("_action", "_left", "_num_bytes", "_recorder", "posted_ns")

    def __init__(self, recorder: Recorder, action: Action, num_bytes: int, num_tensors: int) -> None:
        self._recorder, self._action, self._num_bytes, self._left = recorder, action, num_bytes, num_tensors
        self.posted_ns = 0

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._recorder.hold(-self._num_bytes)
            self._recorder.transfer(self._action, self.posted_ns, self._num_bytes)


class Links:
    """Posts sends and receives, and gives the data to who waits for it.

    `boundaries[s]` names the tensors that stage s hands to stage s + 1; the gradients of those of a floating-point type
    travel back in the same form. Peers, tags and sizes of the rank's transfers are looked up once.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        boundaries: Sequence[Boundary],
        transports: Sequence[Transport],
        staging: Staging,
        recorder: Recorder,
    ) -> None:
        """Check the transfers up.

        Raises:
            ConfigError: this MPI has too few tags for the step's messages.
        """
        self.schedule = schedule
        self._boundaries = boundaries
        self._transports = transports
        self._staging = staging
        self._recorder = recorder
        self._arrivals: dict[Action, _Arrival] = {}
        largest = max((len(boundary) for boundary in boundaries), default=1)
        self._largest, self._max_tensors = largest, most_tensors(schedule, largest)
        check_tags(schedule, self._max_tensors, transports[0].max_tag)
        self._ways = {
            action: self._way_of(action) for action in schedule.rows[rank] if action.kind in SEND_KINDS | RECV_KINDS
        }

    def _way_of(self, action: Action) -> _Way:
        boundary, first = (self._boundaries[boundary_of(action)], first_index(action, self.schedule, self._largest))
        if action.kind in (Kind.SEND_B, Kind.RECV_B):
            boundary = with_gradient(boundary)
        return _Way(
            self._transports[action.direction],
            peer_of(action, self.schedule),
            boundary,
            tuple(tag_of(action, first + index, self.schedule.num_stages, self._max_tensors) for index in range(len(boundary))),
            sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in boundary),
        )  # fmt: skip

    def post_receive(self, action: Action) -> None:
        """Post the buffers that RECV_F or RECV_B names."""
        way = self._ways[action]
        posted_ns = self._recorder.now()
        buffers = [self._staging.take(spec) for spec in way.boundary]
        receive, peer = way.transport.receive, way.peer
        requests = [receive(buffer, peer, tag) for buffer, tag in zip(buffers, way.tags, strict=True)]
        self._recorder.hold(way.num_bytes)
        self._arrivals[action] = _Arrival(buffers, requests, posted_ns)

    def wait(self, action: Action) -> tuple[torch.Tensor, ...]:
        """Wait for a posted receive and gives its tensors, on the rank's device.

        Raises:
            StalledError: nothing came within the stall limit.
        """
        way, arrival = self._ways[action], self._arrivals.pop(action)
        for request in arrival.requests:
            way.transport.wait(request, action)
        self._recorder.transfer(action, arrival.posted_ns, way.num_bytes)
        return tuple(self._staging.to_device(buffer) for buffer in arrival.tensors)

    def post_send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Post the tensors of SEND_F or SEND_B; their memory is free again once they have left."""
        way = self._ways[action]
        departure = _Departure(self._recorder, action, way.num_bytes, len(tensors))
        self._recorder.hold(way.num_bytes)
        ready = [self._staging.to_host(tensor, departure) for tensor in tensors]
        departure.posted_ns = self._recorder.now()  # on a GPU not before the compute is over whose data this is
        for (buffer, done), tag in zip(ready, way.tags, strict=True):
            way.transport.send(buffer, way.peer, tag, done)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Return received tensors back once nothing reads them any more."""
        self._recorder.hold(-sum(tensor.nbytes for tensor in tensors))
        self._staging.give_back(tensors)

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
    """Return the tensors of a boundary whose gradients travel back: those of a floating-point type."""
    return tuple(spec for spec in boundary if spec.dtype.is_floating_point)


def open_transports(
    pipeline: Comm, num_directions: int, hang_timeout_s: float, spin_s: float = SPIN_S
) -> list[Transport]:
    """Make a transport, with a communicator of its own, for each direction; collective over the pipeline."""
    return [Transport(pipeline, hang_timeout_s, spin_s) for _ in range(num_directions)]

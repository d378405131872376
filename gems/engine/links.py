"""Links: the transfers of a schedule, as messages between the ranks of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gems.engine.recorder import Recorder
from gems.engine.staging import Staging
from gems.engine.transport import Comm, Transport
from gems.errors import ConfigError
from gems.models.build import TensorSpec
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

Boundary = tuple[TensorSpec, ...]


def tag_of(action: Action, index: int, num_stages: int, max_tensors: int) -> int:
    """Gives the tag of tensor `index` of a transfer: one number for each (micro-batch, stage of the sender, way, tensor).

    The direction is not in it: each direction has a communicator of its own.
    """
    is_backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
    sender = action.stage + {Kind.RECV_F: -1, Kind.RECV_B: 1}.get(action.kind, 0)
    assert action.micro_batch is not None
    return ((action.micro_batch * num_stages + sender) * 2 + is_backward) * max_tensors + index


@dataclass(slots=True)
class _Arrival:
    tensors: list[torch.Tensor]
    requests: list[Any]
    posted_ns: int = 0
    moved_bytes: int = 0


@dataclass(slots=True)
class Links:
    """Posts sends and receives, and gives the data to who waits for it.

    `boundaries[s]` names the tensors that stage s hands to stage s + 1; the gradients of those of a floating-point type
    travel back in the same form.
    """

    schedule: Schedule
    rank: int
    boundaries: Sequence[Boundary]
    transports: Sequence[Transport]
    staging: Staging
    recorder: Recorder
    _arrivals: dict[Action, _Arrival] = field(default_factory=dict)
    _max_tensors: int = 1

    def __post_init__(self) -> None:
        self._max_tensors = max((len(boundary) for boundary in self.boundaries), default=1)
        top = Action(Kind.SEND_B, self.schedule.num_stages - 1, self.schedule.num_micro_batches)
        if tag_of(top, 0, self.schedule.num_stages, self._max_tensors) > self.transports[0].max_tag:
            raise ConfigError(
                "parallel.micro_batches", self.schedule.num_micro_batches,
                f"this MPI has message tags up to {self.transports[0].max_tag} only", "use fewer micro-batches",
            )  # fmt: skip

    def post_receive(self, action: Action) -> None:
        """Posts the buffers that RECV_F or RECV_B names."""
        is_forward = action.kind is Kind.RECV_F
        boundary = (
            self.boundaries[action.stage - 1] if is_forward else with_gradient(self.boundaries[action.stage])
        )
        peer = self.schedule.placement.rank_of(action.direction, action.stage + (-1 if is_forward else 1))
        arrival = _Arrival([], [], self.recorder.now())
        transport = self.transports[action.direction]
        for index, spec in enumerate(boundary):
            buffer = self.staging.take(spec)
            arrival.requests.append(transport.receive(buffer, peer, self._tag(action, index)))
            arrival.tensors.append(buffer)
            arrival.moved_bytes += buffer.numel() * buffer.element_size()
        self.recorder.hold(arrival.moved_bytes)
        self._arrivals[action] = arrival

    def wait(self, action: Action) -> tuple[torch.Tensor, ...]:
        """Waits for a posted receive and gives its tensors, on the rank's device.

        Raises:
            StalledError: nothing came within the stall limit.
        """
        arrival = self._arrivals.pop(action)
        for request in arrival.requests:
            self.transports[action.direction].wait(request, action)
        self.recorder.transfer(action, arrival.posted_ns, arrival.moved_bytes)
        return tuple(self.staging.to_device(buffer) for buffer in arrival.tensors)

    def post_send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Posts the tensors of SEND_F or SEND_B; their memory is free again once they have left."""
        is_forward = action.kind is Kind.SEND_F
        peer = self.schedule.placement.rank_of(action.direction, action.stage + (1 if is_forward else -1))
        transport = self.transports[action.direction]
        left = len(tensors)
        moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.recorder.hold(moved_bytes)

        def one_left() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.recorder.hold(-moved_bytes)
                self.recorder.transfer(action, posted_ns, moved_bytes)

        ready = [self.staging.to_host(tensor, one_left) for tensor in tensors]
        posted_ns = self.recorder.now()  # on a GPU not before the compute is over whose data this is
        for index, (buffer, done) in enumerate(ready):
            transport.send(buffer, peer, self._tag(action, index), done)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives received tensors back once nothing reads them any more."""
        self.recorder.hold(-sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        self.staging.give_back(tensors)

    def poll(self) -> None:
        """Lets messages move while the rank computes."""
        for transport in self.transports:
            transport.poll()

    def drain(self) -> None:
        """Waits for the last sends of a step."""
        for transport in self.transports:
            transport.drain()

    def _tag(self, action: Action, index: int) -> int:
        return tag_of(action, index, self.schedule.num_stages, self._max_tensors)


def with_gradient(boundary: Boundary) -> Boundary:
    """Gives the tensors of a boundary whose gradients travel back: those of a floating-point type."""
    return tuple(spec for spec in boundary if spec.dtype.is_floating_point)


def open_transports(pipeline: Comm, num_directions: int, stall_limit_s: float) -> list[Transport]:
    """Makes a transport, with a communicator of its own, for each direction; collective over the pipeline."""
    return [Transport(pipeline, stall_limit_s) for _ in range(num_directions)]

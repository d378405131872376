"""Point-to-point channels: a schedule's transfers as messages between the ranks of a pipeline."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.links import Links
from gems.engine.transport.message_tags import MessageTags
from gems.engine.transport.staging import Buffer, Incoming, Staging
from gems.models.build import TensorSpec
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import boundary_of
from gems.schedule.edges import BACKWARD_KINDS
from gems.schedule.schedule import Schedule

Boundary = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The properties of a transfer that are the same in every step."""

    links: Links
    peer: int
    specs: Boundary
    tags: Sequence[int]
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Receive:
    """A receive under way, with a request for each of its buffers that was posted.

    The first `num_brought` buffers are on their way to the device.
    """

    tensors: list[Incoming]
    places: list[tuple[Incoming, int]]  # of the buffers, tensor by tensor
    requests: list[Any]
    posted_ns: int
    num_brought: int = 0


class P2PChannels:
    """Posts the sends and receives of one rank, and waits for data.

    Links get a message once the device has done with its buffer: at once on a CPU; on a GPU, when a
    poll finds that it has. Messages to or from a peer, forward or backward, keep the order of the
    schedule, because some links match messages by order.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        boundaries: Sequence[Boundary],
        links: Sequence[Links],
        staging: Staging,
        recorder: Recorder,
    ) -> None:
        """Look up peers, tags and sizes, once for all steps.

        `boundaries` are the output tensors of each stage, or of each strip of each stage in order;
        a boundary may be empty. The gradients of floating-point tensors travel back. `links` are
        the links of forward and of backward messages.

        Raises:
            ConfigError: The links have too few tags for the messages of a step.
        """
        self._boundaries = boundaries = [
            tuple(map(self.spec_in_memory, boundary)) for boundary in boundaries
        ]
        self._links = links
        self._staging = staging
        self._recorder = recorder
        self._others: list[Callable[[], None]] = []
        self._receives: dict[Action, _Receive] = {}
        self._unposted: dict[tuple[int, Kind], deque[tuple[Buffer, Callable[[], None]]]] = {}
        size = max((sum(map(staging.num_pieces, boundary)) for boundary in boundaries), default=1)
        tags = MessageTags(schedule, size, links[0].max_tag)
        self._transfers: dict[Action, _Transfer] = {}
        for action in schedule.rank_schedules[rank]:
            if action.kind in SEND_KINDS | RECV_KINDS:
                strip = (action.micro_batch or 0) % schedule.num_strips
                specs = boundaries[boundary_of(action) * schedule.num_strips + strip]
                is_backward = action.kind in BACKWARD_KINDS
                if is_backward:
                    specs = with_gradient(specs)
                num_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
                peer = tags.peer(action)
                numbers = tags.tags(action, sum(map(staging.num_pieces, specs)))
                self._transfers[action] = _Transfer(
                    links[is_backward], peer, specs, numbers, num_bytes
                )

    @staticmethod
    def spec_in_memory(spec: TensorSpec) -> TensorSpec:
        """Return a tensor's spec in the memory order in which it travels."""
        return spec

    def post_receive(self, action: Action) -> None:
        """Post the buffers of a RECV_F or RECV_B."""
        transfer = self._transfers[action]
        posted_ns = time.perf_counter_ns()
        tensors = [self._staging.receiving(spec) for spec in transfer.specs]
        places = [(tensor, place) for tensor in tensors for place in range(len(tensor.buffers))]
        receive = self._receives[action] = _Receive(
            tensors, places, [None] * len(places), posted_ns
        )
        self._recorder.count_bytes(transfer.num_bytes)
        for number, (tensor, place) in enumerate(places):
            buffer = tensor.buffers[place]
            self._post_when_ready(
                action, buffer, partial(self._give_to_receive, transfer, receive, number, buffer)
            )

    def wait(self, action: Action) -> tuple[torch.Tensor, ...]:
        """Wait for a posted receive and return its tensors on the rank's device."""
        transfer = self._transfers[action]
        receive = self._receives.pop(action)
        if None in receive.requests:
            transfer.links.wait_until(
                lambda: None not in receive.requests, action, self._post_ready
            )
        for number, request in enumerate(receive.requests):
            transfer.links.wait(request, action, self._post_ready)
            if number == receive.num_brought:
                self._bring_next(receive)
        self._recorder.transfer(action, receive.posted_ns, transfer.num_bytes)
        return tuple(map(self._staging.received, receive.tensors))

    def post_send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Post the tensors of a SEND_F or SEND_B; their memory is freed once they have left."""
        transfer = self._transfers[action]
        num_unsent = len(transfer.tags)
        posted_ns = time.perf_counter_ns()

        def begin(buffer: Buffer, tag: int) -> None:
            nonlocal posted_ns
            posted_ns = time.perf_counter_ns()  # on a GPU not before the tensors have been computed
            buffer.source = None
            transfer.links.send(buffer.tensor, transfer.peer, tag, partial(end, buffer))

        def end(buffer: Buffer) -> None:  # of one piece; the last one ends the transfer
            nonlocal num_unsent
            self._staging.sent(buffer)
            num_unsent -= 1
            if not num_unsent:
                end_transfer()

        def end_transfer() -> None:
            self._recorder.count_bytes(-transfer.num_bytes)
            self._recorder.transfer(action, posted_ns, transfer.num_bytes)

        self._recorder.count_bytes(transfer.num_bytes)
        buffers = [buffer for tensor in tensors for buffer in self._staging.sending(tensor)]
        for buffer, tag in zip(buffers, transfer.tags, strict=True):
            self._post_when_ready(action, buffer, partial(begin, buffer, tag))
        if not buffers:
            end_transfer()

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Release received tensors that nothing reads any more."""
        self.hand_over(tensors)
        self._staging.release(tensors)

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Stop counting received tensors, whose memory belongs to another owner from now on."""
        self._recorder.count_bytes(-sum(tensor.nbytes for tensor in tensors))

    def num_gradients(self, stage: int) -> int:
        """Return the number of tensors in the gradient of a stage's output."""
        return len(with_gradient(self._boundaries[stage]))

    def poll_also(self, other: Callable[[], None]) -> None:
        """Call `other` at each poll and during waits, for other work under way."""
        self._others.append(other)

    def poll(self) -> None:
        """Let messages move while the rank computes."""
        self._post_ready()
        for links in self._links:
            links.poll()
        if not self._staging.is_direct:
            for action, receive in self._receives.items():
                is_complete = self._transfers[action].links.is_complete
                for request in receive.requests[receive.num_brought :]:
                    if request is None or not is_complete(request):
                        break
                    self._bring_next(receive)

    def post_all(self) -> None:
        """Wait until links have all posted messages, before a wait that does not poll for them."""
        if self._unposted:
            self._links[0].wait_until(lambda: not self._unposted, "the device", self._post_ready)

    def drain(self) -> None:
        """Wait for the last sends of a step."""
        self.post_all()
        for links in self._links:
            links.drain()

    def _post_when_ready(self, action: Action, buffer: Buffer, post: Callable[[], None]) -> None:
        edge = self._transfers[action].peer, action.kind
        if edge not in self._unposted and buffer.is_ready:
            post()
        else:
            self._unposted.setdefault(edge, deque()).append((buffer, post))

    def _post_ready(self) -> None:
        """Give links the buffers that the device has done with, in the order of each peer."""
        for other in self._others:
            other()
        for edge, waiting in list(self._unposted.items()):
            while waiting and waiting[0][0].is_ready:
                waiting.popleft()[1]()
            if not waiting:
                del self._unposted[edge]

    def _give_to_receive(
        self, transfer: _Transfer, receive: _Receive, number: int, buffer: Buffer
    ) -> None:
        receive.requests[number] = transfer.links.receive(
            buffer.tensor, transfer.peer, transfer.tags[number]
        )

    def _bring_next(self, receive: _Receive) -> None:
        self._staging.bring(*receive.places[receive.num_brought])
        receive.num_brought += 1


def with_gradient(boundary: Boundary) -> Boundary:
    """Return the tensors of a boundary that have a gradient: those with a floating-point type."""
    return tuple(spec for spec in boundary if spec.dtype.is_floating_point)

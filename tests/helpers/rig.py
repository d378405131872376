"""One rank's executor on a network that is as late as MPI may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from gems.engine.executor import Batch, Executor, Training
from gems.engine.stages.open_stages import StageOptions, open_stages
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.message_tags import message_tag
from gems.engine.transport.mpi import gpu_support
from gems.engine.transport.p2p_channels import P2PChannels
from gems.engine.transport.staging import HostStaging, Staging
from gems.models.build import TensorSpec
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.edges import BACKWARD_KINDS
from gems.schedule.schedule import Schedule
from tests.helpers.device import DEVICE, ON_GPU

# micro-batches, samples of each, values of a sample
N = 4
SIZE = 2
WIDTH = 6


class ListPart:
    """A trace part that keeps its rows."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.rows: list[tuple] = []

    def add(self, table: str, row: tuple) -> None:
        assert table == "events"
        self.rows.append(row)


def staging_for_mpi() -> Staging:
    """Return what real messages need: memory of the host, unless MPI takes that of the device."""
    return HostStaging(DEVICE) if ON_GPU and not gpu_support() else Staging(DEVICE)


class LateTransport:
    """Stands for links of one way, forward or backward, and the other ranks, and moves data as late as MPI may.

    A buffer is filled when it is waited for, with `source(action, index)`. A tensor is read at the
    end of the step; earlier only the forward whose gradient has come back, for the peer must have
    had it. With `at_once` all sends leave when they are posted.
    """

    max_tag = 1 << 20

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        way: int,
        boundaries: Sequence[Sequence[TensorSpec]],
        source: Callable[[Action, int], Tensor],
        at_once: bool = False,
        other_way: LateTransport | None = None,
    ) -> None:
        self.sent: dict[Action, list[Tensor]] = (
            defaultdict(list) if other_way is None else other_way.sent
        )
        self._source = source
        self._at_once = at_once
        self._posted: dict[Action, list] = (
            defaultdict(list) if other_way is None else other_way._posted
        )
        most = max((len(boundary) for boundary in boundaries), default=1)
        self._of_tag = {
            (kind in SEND_KINDS, message_tag(action, index, schedule.num_stages, most)): (
                action,
                index,
            )
            for action in schedule.rank_schedules[rank]
            for kind in (action.kind,)
            if kind in SEND_KINDS | RECV_KINDS and (kind in BACKWARD_KINDS) == bool(way)
            for index in range(most)
        }

    def send(
        self, tensor: Tensor, rank: int, tag: int, done: Callable[[], None] | None = None
    ) -> None:
        assert tensor.is_contiguous()
        action, _ = self._of_tag[True, tag]
        self._posted[action].append((tensor, done))
        if self._at_once:
            self._deliver(action)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> tuple[Tensor, Action, int]:
        return (tensor, *self._of_tag[False, tag])

    def wait(
        self, request: tuple[Tensor, Action, int], what: object = "", meanwhile: object = None
    ) -> None:
        buffer, action, index = request
        if action.kind is Kind.RECV_B:
            self._deliver(action._replace(kind=Kind.SEND_F))
        buffer.copy_(self._source(action, index))

    def wait_until(
        self, is_done: Callable[[], bool], what: object, meanwhile: Callable[[], None]
    ) -> None:
        while not is_done():
            meanwhile()

    def poll(self) -> None:
        """Move nothing."""

    def drain(self) -> None:
        for action in list(self._posted):
            self._deliver(action)

    def _deliver(self, action: Action) -> None:
        for tensor, done in self._posted.pop(action, []):
            self.sent[action].append(tensor.cpu().clone())
            if done is not None:
                done()


class NoUpdate:
    """Leaves the weights as they are."""

    loss_scale = 1.0
    gradients = SimpleNamespace(start_reduce=lambda stage, done: None)

    def begin(self) -> None:
        """Clear nothing."""

    def reduce(self, losses) -> None:
        """Sum nothing."""

    def step(self) -> None:
        """Change nothing."""


class Rig:
    """One rank's executor with its own ledger and events, and a late network where it has neighbours.

    With a memory plan, or copies in the schedule, saved tensors are in a store (`segments`).
    """

    def __init__(
        self,
        schedule,
        rank,
        modules,
        boundaries=(),
        source=None,
        at_once=False,
        plan=None,
        host_limit_bytes=None,
        labels_per_step=1,
        heartbeat=None,
    ) -> None:
        self.part = ListPart(rank)
        self.recorder = Recorder(self.part, DEVICE)
        self.memory = self.recorder.memory
        forward = LateTransport(schedule, rank, 0, boundaries, source, at_once)
        self.transports = [
            forward,
            LateTransport(schedule, rank, 1, boundaries, source, at_once, forward),
        ]
        channels = P2PChannels(
            schedule, rank, boundaries, self.transports, Staging(DEVICE), self.recorder
        )
        self.segments = open_stages(
            {held: nn.ModuleList(kept).to(DEVICE) for held, kept in modules.items()},
            StageOptions(schedule, rank, DEVICE, plan, host_limit_bytes=host_limit_bytes),
            channels.poll,
            self.recorder,
        )
        self.stages = self.segments.whole
        self.executor = Executor(
            schedule,
            rank,
            self.segments,
            channels,
            self.recorder,
            heartbeat,
            Training(
                summed_loss,
                lambda labels, windows: labels_per_step,
                NoUpdate(),
                lambda step, micro_batch: None,
            ),
        )

    def run(self, batch: Batch, step: int = 0):
        images, labels = (
            {m: held.to(DEVICE) for m, held in part.items()}
            for part in (batch.images, batch.labels)
        )
        loss_sum = self.executor.run(step, replace(batch, images=images, labels=labels))
        self.recorder.end_step()
        return loss_sum


def summed_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy summed over a micro-batch."""
    return nn.functional.cross_entropy(outputs, labels, reduction="sum")


def images_and_labels(num: int = N, shape: tuple[int, ...] = (WIDTH,)) -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(3)
    images = {m: torch.randn(SIZE, *shape, generator=generator, device="cpu") for m in range(num)}
    labels = {
        m: torch.randint(0, WIDTH, (SIZE,), generator=generator, device="cpu") for m in range(num)
    }
    return images, labels

"""The executor: runs one rank's row of the lowered schedule, the very list that was validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from gems.engine.gradients import Gradients, Held
from gems.engine.ledger import tensor_bytes
from gems.engine.links import Links
from gems.engine.recorder import Recorder
from gems.engine.stage import Stage
from gems.heartbeat import Heartbeat
from gems.schedule.action import RECV_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, transfer_after
from gems.schedule.schedule import Schedule

NO_LABEL = -1  # a sample that only fills a micro-batch


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank reads of one step: images (N, C, H, W) and labels (N,) by micro-batch, where it needs them."""

    images: Mapping[int, Tensor]
    labels: Mapping[int, Tensor]


@dataclass(slots=True)
class Score:
    """Sums over the samples that a rank has seen at the last stage."""

    loss_sum: float = 0.0
    num_correct: int = 0
    num_samples: int = 0


@dataclass(slots=True)
class _Sums:
    """Losses and hits as tensors: reading them at each micro-batch would make the host wait for a GPU."""

    losses: list[Tensor] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)

    def read(self) -> Score:
        if not self.losses:
            return Score()
        loss = float(torch.stack(self.losses).double().sum())
        return Score(loss, int(torch.stack(self.hits).sum()), int(torch.stack(self.samples).sum()))


class Executor:
    """Runs the row of `rank`, action by action, through a table from kind to handler.

    Transfers only post; the action that needs the data waits for it. Each micro-batch's loss is the sum over its
    samples divided by all samples of the step (`samples_per_step`, over directions and replicas), so that summed
    gradients are those of the mean over everything, however the step is cut.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[Held, Stage],
        links: Links,
        recorder: Recorder,
        heartbeat: Heartbeat | None = None,
        samples_per_step: int = 1,
        gradients: Gradients | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self._row = [(action, str(action)) for action in schedule.rows[rank]]
        self._stages = stages
        self._links = links
        self._recorder = recorder
        self._heartbeat = heartbeat
        self._samples_per_step = samples_per_step
        self._gradients = gradients
        self._optimizer = optimizer
        self._last_stage = schedule.num_stages - 1
        self._needs = {action: self._source_of(action) for action in schedule.rows[rank]}
        self._goes_to = {action: self._taker_of(action) for action in schedule.rows[rank]}
        self._out: dict[Action, tuple[Tensor, ...]] = {}
        self._batch = Batch({}, {})
        self._sums = _Sums()
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._infer if schedule.forward_only else self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: links.post_receive,
            Kind.RECV_B: links.post_receive,
            Kind.REDUCE_GRAD: self._reduce,
            Kind.STEP: self._step,
        }

    def run(self, step: int, batch: Batch) -> Score:
        """Runs the row once and gives what the last stages on this rank saw of the loss."""
        self._batch = batch
        self._sums = _Sums()
        self._recorder.begin_step(step)
        if self._gradients is not None:
            self._gradients.zero()
        images_bytes = tensor_bytes(batch.images.values())
        self._recorder.hold(images_bytes)
        for action, text in self._row:
            if self._heartbeat is not None:
                self._heartbeat.beat(step, text)
            self._handlers[action.kind](action)
            self._links.poll()
        self._links.drain()
        self._recorder.hold(-images_bytes)
        return self._sums.read()

    def _source_of(self, action: Action) -> Action | None:
        """Gives the action whose data comes from outside the stage: a receive, or a neighbour on this rank."""
        if action.kind not in (Kind.F, Kind.B):
            return None
        return next(
            (
                need
                for need in dependencies(action, self.schedule)
                if need.stage != action.stage or need.kind in RECV_KINDS
            ),
            None,
        )

    def _taker_of(self, action: Action) -> Action:
        """Gives the send that takes what a compute action makes; itself where a neighbour on this rank takes it."""
        transfer = transfer_after(action, self.schedule)
        return action if transfer is None else transfer[0]

    def _forward(self, action: Action) -> None:
        stage, micro_batch = self._stages[action.direction, action.stage], _micro_batch(action)
        inputs = self._inputs(action)
        start = self._recorder.mark()
        if action.stage == self._last_stage:
            stage.forward(
                micro_batch, inputs, lambda logits: self._loss(logits, self._batch.labels[micro_batch])
            )
        else:
            self._hand_on(action, stage.forward(micro_batch, inputs))
        self._recorder.hold(stage.stash_bytes or 0)
        self._recorder.compute(action, start)

    def _backward(self, action: Action) -> None:
        stage = self._stages[action.direction, action.stage]
        if action.stage == self._last_stage:
            gradients: tuple[Tensor, ...] = ()
            received: tuple[Tensor, ...] = ()
        else:
            gradients = received = self._arrived(action)
        start = self._recorder.mark()
        if action.stage == self._last_stage:
            gradients = (self._scale(),)
        input_gradients, inputs = stage.backward(_micro_batch(action), gradients)
        self._recorder.hold(-(stage.stash_bytes or 0))
        if action.stage:
            self._hand_on(action, _unshared(input_gradients, received))
            self._release(inputs, Action(Kind.F, action.stage, action.micro_batch, action.direction))
        self._release(received, action)
        self._recorder.compute(action, start)

    def _infer(self, action: Action) -> None:
        stage = self._stages[action.direction, action.stage]
        inputs = self._inputs(action)
        start = self._recorder.mark()
        outputs = stage.infer(inputs)
        if action.stage == self._last_stage:
            self._loss(outputs[0], self._batch.labels[_micro_batch(action)])
        else:
            self._hand_on(action, _unshared(outputs, inputs))
        if action.stage:
            self._release(inputs, action)
        self._recorder.compute(action, start)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits.float() if logits.dtype is torch.bfloat16 else logits
        loss = functional.cross_entropy(wide, labels, reduction="sum", ignore_index=NO_LABEL)
        self._sums.losses.append(loss.detach())
        self._sums.hits.append((logits.detach().argmax(1) == labels).sum())
        self._sums.samples.append((labels != NO_LABEL).sum())
        return loss

    def _scale(self) -> Tensor:
        like = self._sums.losses[-1]
        return torch.full_like(like, 1.0 / self._samples_per_step)

    def _inputs(self, action: Action) -> tuple[Tensor, ...]:
        return (self._batch.images[_micro_batch(action)],) if action.stage == 0 else self._arrived(action)

    def _arrived(self, action: Action) -> tuple[Tensor, ...]:
        source = self._needs[action]
        assert source is not None
        return self._links.wait(source) if source.kind in RECV_KINDS else self._out.pop(source)

    def _release(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Gives receive buffers back; tensors of a neighbour on this rank are simply dropped."""
        source = self._needs[action]
        if source is not None and source.kind in RECV_KINDS:
            self._links.release(tensors)

    def _hand_on(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        """Keeps what an action made until its send posts it, or its neighbour on this rank takes it."""
        self._out[self._goes_to[action]] = tensors

    def _send(self, action: Action) -> None:
        self._links.post_send(action, self._out.pop(action))

    def _reduce(self, action: Action) -> None:
        start = self._recorder.mark()
        if self._gradients is not None:
            self._gradients.reduce()
        self._recorder.compute(action, start)

    def _step(self, action: Action) -> None:
        start = self._recorder.mark()
        if self._optimizer is not None:
            self._optimizer.step()
        self._recorder.compute(action, start)


def _micro_batch(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch


def _unshared(made: tuple[Tensor, ...], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies what lies in the memory of a receive buffer, which is about to be filled again.

    A layer may hand a view of its input on (flatten, identity), and autograd a view of the gradient.
    """
    taken = {tensor.untyped_storage().data_ptr() for tensor in received}
    return tuple(
        tensor.clone() if tensor.untyped_storage().data_ptr() in taken else tensor for tensor in made
    )

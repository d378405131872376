"""The executor: runs one rank's row of the lowered schedule, the very list that was validated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from gems.engine.gradients import Gradients, Held
from gems.engine.ledger import Share, tensor_bytes
from gems.engine.links import Links
from gems.engine.loop import Loop
from gems.engine.recorder import Recorder
from gems.engine.stage import Stage
from gems.heartbeat import Heartbeat
from gems.schedule.action import RECV_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, transfer_after
from gems.schedule.schedule import Schedule

NO_LABEL = -1  # a sample that only fills a micro-batch


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank reads of one step, by micro-batch, where it needs them: samples and labels.

    Samples are images (N, C, H, W) with labels (N,), or tokens (N, T) or (N, 2, T) with labels (N, T).
    """

    images: Mapping[int, Tensor]
    labels: Mapping[int, Tensor]


@dataclass(slots=True)
class Score:
    """Sums over the labels that a rank has seen at the last stage: one of an image, one of each token."""

    loss_sum: float = 0.0
    num_correct: int = 0
    num_labels: int = 0


@dataclass(slots=True)
class _Sums:
    """Losses and hits as tensors: reading them at each micro-batch would make the host wait for a GPU."""

    losses: list[Tensor] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def read(self) -> Score:
        if not self.losses:
            return Score()
        loss = float(torch.stack(self.losses).double().sum())
        return Score(loss, int(torch.stack(self.hits).sum()), int(torch.stack(self.labels).sum()))


class Executor:
    """Runs the row of `rank`, action by action, through a table from kind to handler.

    Transfers only post; the action that needs the data waits for it. Each micro-batch's loss is the sum over its
    labels divided by all labels of the step (`labels_per_step`, over directions and replicas; an image has one, a
    sequence one a token), so that summed gradients are those of the mean over everything, however the step is cut.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[Held, Stage],
        links: Links,
        recorder: Recorder,
        heartbeat: Heartbeat | None = None,
        labels_per_step: int = 1,
        gradients: Gradients | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        row = schedule.rows[rank]
        self._stages = stages
        self._links = links
        self._recorder = recorder
        self._labels_per_step = labels_per_step
        self._gradients = gradients
        self._optimizer = optimizer
        self._last_stage = schedule.num_stages - 1
        self._needs = {action: self._source_of(action) for action in row}
        self._goes_to = {action: self._taker_of(action) for action in row}
        # what stages keep between F and the end of backward, and what one stage hands to another on this rank
        self.activations = Share(recorder.hold)
        self.handed_over = Share(recorder.hold)
        for direction, stage in {(a.direction, a.stage) for a in row if a.kind is Kind.I}:
            stages[direction, stage].split_layers()
        self._out: dict[Action, tuple[Tensor, ...]] = {}
        self._lent: dict[Action, list[tuple[list[Tensor], Action]]] = {}
        self._batch = Batch({}, {})
        self._sums = _Sums()
        handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._infer if schedule.forward_only else self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: links.post_receive,
            Kind.RECV_B: links.post_receive,
            Kind.REDUCE_GRAD: self._reduce,
            Kind.STEP: self._step,
        }
        self._loop = Loop(rank, row, handlers, links.poll, heartbeat)

    def run(self, step: int, batch: Batch) -> Score:
        """Runs the row once and gives what the last stages on this rank saw of the loss."""
        self._batch = batch
        self._sums = _Sums()
        self._recorder.begin_step(step)
        if self._gradients is not None:
            self._gradients.zero()
        images_bytes = tensor_bytes(batch.images.values())
        self._recorder.hold(images_bytes)
        try:
            self._loop.run(step)
            self._links.drain()
        except BaseException:
            self._forget()
            raise
        finally:
            self._recorder.hold(-images_bytes)
        return self._sums.read()

    def _source_of(self, action: Action) -> Action | None:
        """Gives the action whose data comes from outside the stage: a receive, or a neighbour on this rank."""
        if action.kind not in (Kind.F, Kind.B, Kind.I):
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
        stage, micro_batch = self._stage_of(action), _micro_batch(action)
        inputs = self._inputs(action)
        is_split = self.schedule.has(Kind.I, action.stage, micro_batch, action.direction)
        start = self._recorder.mark()
        if action.stage == self._last_stage:
            labels = self._batch.labels[micro_batch]
            stage.forward(micro_batch, inputs, lambda logits: self._loss(logits, labels), is_split)
        else:
            self._hand_on(action, stage.forward(micro_batch, inputs, None, is_split))
        self.activations.hold(stage.stash_bytes or 0)
        self._recorder.compute(action, start)

    def _backward(self, action: Action) -> None:
        stage, received = self._stage_of(action), self._gradients_for(action)
        start = self._recorder.mark()
        gradients, inputs = stage.backward(_micro_batch(action), self._seed(action, received))
        self.activations.hold(-(stage.stash_bytes or 0))
        self._hand_back(action, gradients, received)
        self._release(inputs, action._replace(kind=Kind.F))
        self._release(received, action)
        self._recorder.compute(action, start)

    def _input_gradient(self, action: Action) -> None:
        stage, received, micro_batch = (
            self._stage_of(action),
            self._gradients_for(action),
            _micro_batch(action),
        )
        start = self._recorder.mark()
        gradients, inputs = stage.backward_input(micro_batch, self._seed(action, received))
        self.activations.hold((stage.held_for_weights_bytes or 0) - (stage.stash_bytes or 0))
        self._hand_back(action, gradients, received)
        # a buffer that W reads must not be filled again before
        read = stage.still_read(micro_batch)
        lent = self._lent[action] = []
        for tensors, source in ((inputs, action._replace(kind=Kind.F)), (received, action)):
            lent.append(([tensor for tensor in tensors if _storage(tensor) in read], source))
            self._release([tensor for tensor in tensors if _storage(tensor) not in read], source)
        self._recorder.compute(action, start)

    def _weight_gradient(self, action: Action) -> None:
        stage = self._stage_of(action)
        start = self._recorder.mark()
        stage.backward_weight(_micro_batch(action))
        self.activations.hold(-(stage.held_for_weights_bytes or 0))
        for tensors, source in self._lent.pop(action._replace(kind=Kind.I)):
            self._release(tensors, source)
        self._recorder.compute(action, start)

    def _infer(self, action: Action) -> None:
        stage = self._stage_of(action)
        inputs = self._inputs(action)
        start = self._recorder.mark()
        outputs = stage.infer(inputs)
        if action.stage == self._last_stage:
            self._loss(outputs[0], self._batch.labels[_micro_batch(action)])
        else:
            self._hand_on(action, _unshared(outputs, inputs))
        self._release(inputs, action)
        self._recorder.compute(action, start)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits.float() if logits.dtype is torch.bfloat16 else logits
        loss = functional.cross_entropy(wide, labels, reduction="sum", ignore_index=NO_LABEL)
        self._sums.losses.append(loss.detach())
        self._sums.hits.append((logits.detach().argmax(1) == labels).sum())
        self._sums.labels.append((labels != NO_LABEL).sum())
        return loss

    def _scale(self) -> Tensor:
        like = self._sums.losses[-1]
        return torch.full_like(like, 1.0 / self._labels_per_step)

    def _inputs(self, action: Action) -> tuple[Tensor, ...]:
        return (self._batch.images[_micro_batch(action)],) if action.stage == 0 else self._arrived(action)

    def _arrived(self, action: Action) -> tuple[Tensor, ...]:
        source = self._needs[action]
        assert source is not None
        return self._links.wait(source) if source.kind in RECV_KINDS else self._out.pop(source)

    def _stage_of(self, action: Action) -> Stage:
        return self._stages[action.direction, action.stage]

    def _gradients_for(self, action: Action) -> tuple[Tensor, ...]:
        return () if action.stage == self._last_stage else self._arrived(action)

    def _seed(self, action: Action, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._scale(),) if action.stage == self._last_stage else received

    def _release(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Gives back what came for `action`: receive buffers, or tensors of a neighbour on this rank."""
        source = self._needs[action]
        if source is None or not tensors:
            return
        if source.kind in RECV_KINDS:
            self._links.release(tensors)
        else:
            self.handed_over.hold(-_num_bytes(tensors))

    def _hand_back(self, action: Action, gradients: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> None:
        if action.stage:
            self._hand_on(action, _unshared(gradients, received))

    def _hand_on(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        """Keeps what an action made until its send posts it, or its neighbour on this rank takes it."""
        taker = self._goes_to[action]
        self._out[taker] = tensors
        if taker is action:
            self.handed_over.hold(_num_bytes(tensors))

    def _forget(self) -> None:
        """Lets all that a broken step holds go: the memory must be free for whoever reports the error."""
        for stage in self._stages.values():
            stage.forget()
        self._out.clear()
        self._lent.clear()
        for share in (self.activations, self.handed_over):
            share.hold(-share.held_bytes)

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


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _unshared(made: tuple[Tensor, ...], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies what lies in the memory of a receive buffer, which is about to be filled again.

    A layer may hand a view of its input on (flatten, identity), and autograd a view of the gradient.
    """
    taken = {_storage(tensor) for tensor in received}
    return tuple(tensor.clone() if _storage(tensor) in taken else tensor for tensor in made)

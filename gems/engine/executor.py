"""The executor: runs one rank's row of the lowered schedule, the very list that was validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gems.autograd.memory_counter import Share, tensor_bytes
from gems.engine.action_loop import Loop
from gems.engine.activation_store.segment import StoredSegment
from gems.engine.activation_store.segments import Part, Segments
from gems.engine.gradients import Gradients, Held
from gems.engine.graph_router import GraphHanding
from gems.engine.metrics import Score, Sums, loss_of
from gems.engine.stage import Loss, Stage
from gems.engine.supervision.recorder import Recorder
from gems.engine.tensor_router import Handing, unshared
from gems.engine.transport.p2p_channels import Links
from gems.runs.heartbeat import Heartbeat
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank reads of one step, by micro-batch, where it needs them: samples and labels.

    Samples are images (N, C, H, W) with labels (N,), or tokens (N, T) or (N, 2, T) with labels (N, T).
    """

    images: Mapping[int, Tensor]
    labels: Mapping[int, Tensor]


class Executor:
    """Runs the row of `rank`, action by action, through a table from kind to handler.

    A stage runs whole, or in `segments`, whose saved tensors a store keeps and moves as the list says. Transfers and
    copies only post; the action that needs the data waits for it. Each micro-batch's loss is the sum over its
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
        segments: Segments | None = None,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        row = schedule.rows[rank]
        self._parts: dict[Part, Stage] = {
            (direction, stage, None): whole for (direction, stage), whole in stages.items()
        }
        self._store = None if segments is None else segments.store
        if segments is not None:
            self._parts.update(segments.parts)
        self._links = links
        self._recorder = recorder
        self._labels_per_step = labels_per_step
        self._gradients = gradients
        self._optimizer = optimizer
        self._last_stage = schedule.num_stages - 1
        # what stages keep between F and the end of backward
        self.activations = Share(recorder.hold) if segments is None else segments.store.activations
        is_graph = schedule.placement.feeders is not None
        self.handing = (GraphHanding if is_graph else Handing)(schedule, row, links, recorder)
        for direction, stage in {(a.direction, a.stage) for a in row if a.kind is Kind.I}:
            stages[direction, stage].split_layers()
        self._batch = Batch({}, {})
        self._sums = Sums()
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
        poll = links.poll
        if self._store is not None:
            handlers[Kind.R] = self._run_again
            self._moves = {
                Kind.OFFLOAD: self._store.offload, Kind.FREE: self._store.free,
                Kind.PREFETCH: self._store.prefetch, Kind.AWAIT: self._store.await_copy,
            }  # fmt: skip
            handlers |= dict.fromkeys(self._moves, self._move)
            if schedule.has_any(Kind.OFFLOAD) and not schedule.has_any(Kind.FREE):
                poll = self._poll
        self._loop = Loop(rank, row, handlers, poll, heartbeat)

    def run(self, step: int, batch: Batch) -> Score:
        """Run the row once and gives what the last stages on this rank saw of the loss."""
        self._batch = batch
        self._sums = Sums()
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

    def _forward(self, action: Action) -> None:
        part, micro_batch, loss = self._part_of(action), _micro_batch(action), self._loss_of(action)
        inputs = [self._inputs(action)]
        run = part.first_run if isinstance(part, StoredSegment) and self._has(Kind.R, action) else part.forward
        start = self._recorder.mark()
        # taken out, for inside of a stage nothing but this call may have them
        outputs = run(micro_batch, inputs.pop(), loss, self._has(Kind.I, action))
        if loss is None:
            self.handing.hand_on(action, outputs)
        self.activations.hold(part.stash_bytes or 0)
        self._count_in_flight()
        self._recorder.compute(action, start)

    def _run_again(self, action: Action) -> None:
        part = self._part_of(action)
        assert isinstance(part, StoredSegment)
        start = self._recorder.mark()
        part.run_again(_micro_batch(action), self._loss_of(action))
        self._recorder.compute(action, start)

    def _backward(self, action: Action) -> None:
        part, received = self._part_of(action), self._gradients_for(action)
        start = self._recorder.mark()
        gradients, inputs = part.backward(_micro_batch(action), self._seed(action, received))
        self.activations.hold(-(part.stash_bytes or 0))
        self._hand_back(action, gradients, received)
        self.handing.release(inputs, action._replace(kind=Kind.F))
        self.handing.release(received, action)
        self._count_in_flight()
        self._recorder.compute(action, start)

    def _input_gradient(self, action: Action) -> None:
        part, received = self._part_of(action), self._gradients_for(action)
        start = self._recorder.mark()
        gradients, inputs = part.backward_input(_micro_batch(action), self._seed(action, received))
        self.activations.hold((part.held_for_weights_bytes or 0) - (part.stash_bytes or 0))
        self._hand_back(action, gradients, received)
        self.handing.lend(inputs, action._replace(kind=Kind.F))
        self.handing.lend(received, action)
        self.handing.give_back_lent(action, self._still_read(action))
        self._count_in_flight()
        self._recorder.compute(action, start)

    def _weight_gradient(self, action: Action) -> None:
        part = self._part_of(action)
        start = self._recorder.mark()
        part.backward_weight(_micro_batch(action))
        self.activations.hold(-(part.held_for_weights_bytes or 0))
        self.handing.give_back_lent(action, self._still_read(action))
        self._recorder.compute(action, start)

    def _infer(self, action: Action) -> None:
        stage = self._part_of(action)
        inputs = self._inputs(action)
        start = self._recorder.mark()
        outputs = stage.infer(inputs)
        if action.stage == self._last_stage:
            self._sums.add(outputs[0], self._batch.labels[_micro_batch(action)])
        else:
            self.handing.hand_on(action, unshared(outputs, inputs))
        self.handing.release(inputs, action)
        self._recorder.compute(action, start)

    def _still_read(self, action: Action) -> set[int]:
        """Return the storages that weight gradients to come read of a stage's micro-batch, by their addresses."""
        segments = self.schedule.segments_of(action.stage)
        parts = (self._parts[action.direction, action.stage, segment] for segment in segments)
        return set().union(*(part.still_read(_micro_batch(action)) for part in parts))

    def _count_in_flight(self) -> None:
        if self._store is not None:
            self.handing.count_in_flight(self._store.counts)

    def _move(self, action: Action) -> None:
        self._moves[action.kind](action)
        self._count_in_flight()

    def _poll(self) -> None:
        assert self._store is not None
        self._links.poll()
        self._store.free_copied()

    def _has(self, kind: Kind, action: Action) -> bool:
        return self.schedule.has(kind, action.stage, action.micro_batch, action.direction, action.segment)

    def _part_of(self, action: Action) -> Stage:
        return self._parts[action.direction, action.stage, action.segment]

    def _makes_loss(self, action: Action) -> bool:
        return action.stage == self._last_stage and action.segment == self.schedule.last_segment(action.stage)

    def _loss_of(self, action: Action) -> Loss | None:
        """Return what makes the loss of a micro-batch, where the model ends; a second run counts nothing."""
        if not self._makes_loss(action):
            return None
        labels = self._batch.labels[_micro_batch(action)]
        make = loss_of if action.kind is Kind.R else self._sums.add
        return lambda logits: make(logits, labels)

    def _inputs(self, action: Action) -> tuple[Tensor, ...]:
        found = self.handing.take(action)
        return (self._batch.images[_micro_batch(action)],) if found is None else found

    def _gradients_for(self, action: Action) -> tuple[Tensor, ...]:
        return self.handing.take(action) or ()

    def _seed(self, action: Action, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._sums.scale(self._labels_per_step),) if self._makes_loss(action) else received

    def _hand_back(self, action: Action, gradients: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> None:
        if action.stage or self.handing.stays(action):
            self.handing.hand_on(action, unshared(gradients, received))

    def _forget(self) -> None:
        """Let all that a broken step holds go: the memory must be free for whoever reports the error."""
        for part in self._parts.values():
            part.forget()
        if self._store is not None:
            self._store.forget()
        self.handing.forget()
        self.activations.hold(-self.activations.held_bytes)

    def _send(self, action: Action) -> None:
        self._links.post_send(action, self.handing.take_out(action))

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

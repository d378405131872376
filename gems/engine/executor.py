"""The executor: runs one rank's lowered schedule, exactly as it was validated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from gems.autograd.outputs import as_tuple, map_tensors
from gems.autograd.storages import tensor_bytes
from gems.engine.action_loop import ActionLoop
from gems.engine.evaluation.metrics import LossSums, Metric
from gems.engine.optimization.update import Update
from gems.engine.stage import Loss, Stage
from gems.engine.stages.open_stages import OpenStages
from gems.engine.step_weight import StepWeight
from gems.engine.supervision.out_of_memory import note_memory
from gems.engine.supervision.recorder import Recorder
from gems.engine.tensor_router import TensorRouter, copy_shared
from gems.engine.transport.p2p_channels import P2PChannels
from gems.losses.summed import SummedLoss
from gems.runs.heartbeat import Heartbeat
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule
from gems.streaming.block_plan import Box, is_empty


@dataclass(frozen=True, slots=True)
class Batch:
    """The data that a rank reads for one step, by micro-batch.

    Samples are images (N, C, H, W) or tokens (N, T) or (N, 2, T). Labels are int64 of shape (N,) or
    (N, T), integers of shape (N, H, W), or float32 of shape (N, K). In validation there may be
    fewer labels than samples: the last samples are ignored. If `rows` is given, it returns the rows
    of each strip in place of images, in the order of the schedule; its second argument says whether
    the strip is run again. If the images of a micro-batch are on their way to the device, `arrive`
    is called before they are read. If `masks` is given, it returns the part of the masks that the
    loss of a strip takes, as `rows` does, and `labels` have the shapes of masks only; `windows`
    gives the parts of all masks before, if these determine the weight of the step.
    """

    images: Mapping[int, Tensor]
    labels: Mapping[int, Tensor]
    rows: Callable[[int, bool], Tensor] | None = None
    arrive: Callable[[int], object] | None = None
    masks: Callable[[int, bool], Tensor] | None = None
    windows: Callable[[], Iterable[Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """What a training adds to the forwards of a schedule.

    `step_weight` turns summed gradients into those of the mean loss. `begin_draws` is called with
    step and micro-batch before each forward and recomputation, since these may draw random numbers.
    """

    loss: SummedLoss
    step_weight: StepWeight
    update: Update
    begin_draws: Callable[[int, int], None]


_COMPUTE = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)


class _Task(NamedTuple):
    """What an action of compute runs, looked up once for all steps."""

    segment: Stage
    micro_batch: int
    whole: int  # the micro-batch, also if actions run strips of it
    ends_in_loss: bool
    is_split: bool
    is_run_again: bool


class Executor:
    """Runs the actions of `rank` in order, each with the handler of its kind.

    Stages run whole, or in segments whose saved tensors are in a store. Transfers and copies are
    only posted; the action that needs the data waits for it.

    Attributes:
        stages: The stages in one piece.
        store: The activation store, if the schedule needs one.
        activations: The bytes that stages keep between F and the end of backward.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: OpenStages,
        channels: P2PChannels,
        recorder: Recorder,
        heartbeat: Heartbeat | None = None,
        training: Training | None = None,
    ) -> None:
        """Prepare the handlers; a schedule with a backward needs `training`."""
        self.schedule = schedule
        self.rank = rank
        self.stages = stages.whole
        self.store = stages.store
        self._training = training
        self._weight = 1.0
        self._channels = channels
        self._recorder = recorder
        self._metrics: Sequence[Metric] = ()
        self._last_stage = schedule.num_stages - 1
        self._segments = stages.by_key
        self.activations = (
            recorder.open_counter("activations") if self.store is None else self.store.activations
        )
        self._samples = recorder.open_counter("samples")
        self.router = TensorRouter(schedule, rank, channels, recorder)
        actions = schedule.rank_schedules[rank]
        for key in {
            (action.direction, action.stage) for action in actions if action.kind is Kind.I
        }:
            self.stages[key].split_layers()
        self._tasks = {action: self._task(action) for action in actions if action.kind in _COMPUTE}
        self._batch = Batch({}, {})
        self._step = 0
        self._sums = LossSums()
        is_freed_by_poll = schedule.has_any(Kind.OFFLOAD) and not schedule.has_any(Kind.FREE)
        poll = self._poll_and_free if is_freed_by_poll else channels.poll
        self._loop = ActionLoop(rank, actions, self._handlers(), poll, heartbeat)

    def _handlers(self) -> dict[Kind, Callable[[Action], None]]:
        handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._infer if self.schedule.forward_only else self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weight_gradient,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._channels.post_receive,
            Kind.RECV_B: self._channels.post_receive,
            Kind.START_REDUCE: self._start_reduce,
            Kind.REDUCE_GRAD: self._reduce_or_step,
            Kind.STEP: self._reduce_or_step,
        }
        if self.store is not None:
            self._copies = {Kind.FREE: self.store.free, Kind.PREFETCH: self.store.prefetch}
            handlers |= {
                Kind.R: self._recompute,
                Kind.OFFLOAD: self.store.offload,
                Kind.AWAIT: self.store.await_copy,
                **dict.fromkeys(self._copies, self._copy),
            }
        return handlers

    def run(self, step: int, batch: Batch) -> float:
        """Run all actions once; return the summed loss of this rank's last stages; collective."""
        self._batch = batch
        self._step = step
        self._sums = LossSums()
        if self._training is not None:
            self._weight = self._training.step_weight(batch.labels, batch.windows)
        self._recorder.begin_step(step)
        if self._training is not None:
            self._training.update.begin()
        held_labels = () if batch.masks is not None else batch.labels.values()
        maps = [labels for labels in held_labels if labels.ndim > 2]
        self._samples.set_bytes(tensor_bytes([*batch.images.values(), *maps]))
        try:
            self._loop.run(step)
            self._channels.drain()
        except BaseException as error:
            note_memory(error, self._recorder)
            self._reset()
            raise
        finally:
            self._samples.set_bytes(0)
        return self._sums.read()

    def measure_with(self, metrics: Sequence[Metric]) -> None:
        """Pass the outputs and labels of a schedule without backward to metrics.

        If all of them add up over the parts of maps, they get the outputs of each strip.
        """
        self._metrics = metrics
        for stage in self.stages.values():
            stage.gives_parts = all(metric.takes_parts for metric in metrics)

    def map_parts(self) -> list[Box] | None:
        """Return the parts of maps whose losses or metrics this rank computes, by strip.

        Return None if it computes none, or those of whole maps.
        """
        ends = [task for task in self._tasks.values() if task.ends_in_loss]
        by_strip = {
            task.micro_batch % self.schedule.num_strips: task.segment.part_of(task.micro_batch)
            for task in ends
        }
        boxes = [box for _, box in sorted(by_strip.items()) if box is not None]
        return boxes or None

    def _forward(self, action: Action) -> None:
        task = self._tasks[action]
        segment, micro_batch = task.segment, task.micro_batch
        inputs = [self._inputs(action)]
        labels = self._labels(action)
        loss = self._loss(task, labels)
        if not action.segment and self.schedule.inputs_leave(*action[1:4]):
            self._channels.hand_over(inputs[0])
        self._begin_draws(task)
        # rows that the recomputation will read again
        is_read_again = task.is_run_again and self._reads_rows(action)
        row_bytes = tensor_bytes(inputs[0]) if is_read_again else 0
        start = self._recorder.timestamp()
        # pop, so that within a stage this call holds the only reference to the inputs
        outputs = segment.forward(
            micro_batch, inputs.pop(), loss, is_split=task.is_split, is_run_again=task.is_run_again
        )
        if loss is None:
            self.router.put(action, outputs)
        self.router.input_rows.count_bytes(-row_bytes)
        self._drop_labels(labels)
        self.activations.count_bytes(segment.brought_bytes(micro_batch))
        self._count_between_segments()
        self._recorder.compute(action, start)

    def _recompute(self, action: Action) -> None:
        task = self._tasks[action]
        rows = [self._read_rows(action)] if self._reads_rows(action) else ()
        labels = self._labels(action)
        self._begin_draws(task)
        start = self._recorder.timestamp()
        task.segment.recompute(task.micro_batch, self._loss(task, labels, is_counted=False), rows)
        self._drop_labels(labels)
        self._recorder.compute(action, start)

    def _backward(self, action: Action) -> None:
        """Run a full backward, or one that leaves weight gradients for W."""
        task = self._tasks[action]
        segment, micro_batch = task.segment, task.micro_batch
        received = self.router.take(action) or ()
        start = self._recorder.timestamp()
        is_split = action.kind is Kind.I
        gradients, inputs = (segment.backward_input if is_split else segment.backward)(
            micro_batch, self._output_gradients(task, received)
        )
        held_bytes = segment.held_bytes(micro_batch) if is_split else 0
        self.activations.count_bytes(held_bytes - segment.kept_bytes(micro_batch))
        self.router.put(action, copy_shared(gradients, received))
        let_go = self.router.borrow if is_split else self.router.release
        if inputs:
            let_go(inputs, action._replace(kind=Kind.F))
        let_go(received, action)
        if is_split:
            self.router.release_borrowed(action, self._still_read(action))
        self._count_between_segments()
        self._recorder.compute(action, start)

    def _weight_gradient(self, action: Action) -> None:
        task = self._tasks[action]
        start = self._recorder.timestamp()
        task.segment.backward_weight(task.micro_batch)
        self.activations.count_bytes(-task.segment.held_bytes(task.micro_batch))
        self.router.release_borrowed(action, self._still_read(action))
        self._recorder.compute(action, start)

    def _infer(self, action: Action) -> None:
        inputs = self._inputs(action)
        start = self._recorder.timestamp()
        task = self._tasks[action]
        output = task.segment.infer(inputs)
        if action.stage != self._last_stage:
            self.router.put(action, copy_shared(as_tuple(output), inputs))
        elif output is not None:  # in strips, the last strip may give the output of the image
            labels = self._labels(action)
            assert labels is not None
            self._measure(output, labels, task.segment.part_of(task.micro_batch))
            self._drop_labels(labels)
        self.router.release(inputs, action)
        self._recorder.compute(action, start)

    def _measure(self, output: Any, labels: Tensor, part: Box | None) -> None:
        if not len(labels):
            return
        known = map_tensors(lambda tensor: tensor[: len(labels)], output)
        labels = labels if labels.is_floating_point() else labels.long()
        for metric in self._metrics:
            if part is None:
                metric.update(known, labels)
            else:
                metric.update_part(known, labels, part)

    def _still_read(self, action: Action) -> set[int]:
        """Return the addresses of storages that later weight gradients of the stage will read."""
        names = self.schedule.segments_of(action.stage)
        segments = (self._segments[action.direction, action.stage, name] for name in names)
        return set().union(*(segment.still_read(_micro_batch(action)) for segment in segments))

    def _count_between_segments(self) -> None:
        if self.store is not None:
            self.router.count_between_segments(self.store.is_counted)

    def _copy(self, action: Action) -> None:
        """Run a copy action that changes what is on the device."""
        self._copies[action.kind](action)
        self._count_between_segments()

    def _poll_and_free(self) -> None:
        assert self.store is not None
        self._channels.poll()
        self.store.free_copied()

    def _begin_draws(self, task: _Task) -> None:
        if self._training is not None:
            self._training.begin_draws(self._step, task.whole)

    def _task(self, action: Action) -> _Task:
        stage, micro_batch, segment = action.stage, _micro_batch(action), action.segment
        place = stage, micro_batch, action.direction, segment
        ends = stage == self._last_stage and segment == self.schedule.last_segment(stage)
        return _Task(
            self._segments[action.direction, stage, segment],
            micro_batch,
            micro_batch // self.schedule.num_strips,
            ends_in_loss=ends,
            is_split=self.schedule.has(Kind.I, *place),
            is_run_again=self.schedule.has(Kind.R, *place),
        )

    def _labels(self, action: Action) -> Tensor | None:
        """Return the labels of the outputs of an action at the end of the model."""
        task = self._tasks[action]
        if not task.ends_in_loss:
            return None
        part = task.segment.part_of(task.micro_batch)
        masks = self._batch.masks
        if masks is None or part is None or is_empty(part):
            return part_of_maps(self._batch.labels[task.whole], part)
        start_ns = time.perf_counter_ns()
        labels = masks(task.micro_batch, action.kind is Kind.R)
        self._recorder.waited(self._step, start_ns, time.perf_counter_ns(), action)
        self._samples.count_bytes(labels.nbytes)
        return labels

    def _drop_labels(self, labels: Tensor | None) -> None:
        """Count labels that `_labels` has read as dropped."""
        if labels is not None and self._batch.masks is not None:
            self._samples.count_bytes(-labels.nbytes)

    def _loss(self, task: _Task, labels: Tensor | None, is_counted: bool = True) -> Loss | None:
        """Return the loss function of a micro-batch at the end of the model.

        Recomputation counts no metrics.
        """
        if labels is None:
            return None
        assert self._training is not None
        loss = self._training.loss
        if is_counted:
            return lambda output: self._sums.add(loss(output, labels))
        return lambda output: loss(output, labels)

    def _inputs(self, action: Action) -> tuple[Tensor, ...]:
        inputs = self.router.take(action)
        if inputs is not None:
            return inputs
        if self._reads_rows(action):
            return (self._read_rows(action),)
        whole = self._tasks[action].whole
        if self._batch.arrive is not None:
            self._batch.arrive(whole)
        return (self._batch.images[whole],)

    def _reads_rows(self, action: Action) -> bool:
        return self._batch.rows is not None and not action.stage

    def _read_rows(self, action: Action) -> Tensor:
        assert self._batch.rows is not None
        start_ns = time.perf_counter_ns()
        rows = self._batch.rows(_micro_batch(action), action.kind is Kind.R)
        self._recorder.waited(self._step, start_ns, time.perf_counter_ns(), action)
        self.router.hold_rows(rows, action._replace(kind=Kind.F))
        return rows

    def _output_gradients(self, task: _Task, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not task.ends_in_loss:
            return received
        assert self._training is not None
        scale = self._training.update.loss_scale
        return (self._sums.loss_gradient(self._weight) * scale,)

    def _reset(self) -> None:
        """Release all tensors after a failed step."""
        for segment in self._segments.values():
            segment.reset()
        if self.store is not None:
            self.store.reset()
        self.router.reset()
        self.activations.set_bytes(0)

    def _send(self, action: Action) -> None:
        self._channels.post_send(action, self.router.take_for_send(action))

    def _start_reduce(self, action: Action) -> None:
        assert self._training is not None
        done = partial(self._recorder.transfer, action, time.perf_counter_ns())
        self._training.update.gradients.start_reduce(action.stage, done)

    def _reduce_or_step(self, action: Action) -> None:
        self._channels.post_all()  # peers need these messages before they reach the sum
        start = self._recorder.timestamp()
        assert self._training is not None
        if action.kind is Kind.REDUCE_GRAD:
            self._training.update.reduce(self._sums)
        else:
            self._training.update.step()
        self._recorder.compute(action, start)


def part_of_maps(labels: Tensor, part: Box | None) -> Tensor:
    """Return a part of maps (N, H, W); labels that are no maps are returned whole."""
    if part is None or labels.ndim < 3:
        return labels
    for dim, (begin, end) in enumerate(part, 1):
        labels = labels.narrow(dim, begin, end - begin)
    return labels


def _micro_batch(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch

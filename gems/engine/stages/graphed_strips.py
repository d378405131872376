"""Stages in strips whose actions are CUDA graphs: one for each strip of an image in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from gems.autograd.mixed import Mixed
from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.storages import StashMeter, storage_addresses, storage_sizes
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.graphed import Captures, GraphedStage, Layouts, Replays
from gems.engine.stages.layer_graphs import (
    Gradients,
    apart,
    capturing,
    compare,
    copies,
    floating,
    floating_flags,
    mixed_layers,
    ramp,
    restore,
)
from gems.engine.stages.streamed import StreamedStage
from gems.schedule.action import Kind

_SAMPLE = -1  # stands for a micro-batch in a capture


@dataclass(slots=True)
class _Strip:
    """The graphs of a strip, and the tensors that they read and write.

    On the last stage, a strip that a loss follows has the outputs that it takes, and others have none.
    `flags` say which of them have a gradient.
    """

    inputs: Tensors
    mixed: list[Mixed]
    outputs: Any = ()
    flags: Sequence[bool] = ()
    output_gradients: Gradients = ()
    input_gradients: Tensors = ()
    graphs: dict[Kind, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def forward(self, inputs: Sequence[Tensor]) -> Any:
        """Replay F, and return copies of its outputs."""
        _put(self.inputs, inputs)
        for mixed in self.mixed:
            mixed.refresh()
        self.graphs[Kind.F].replay()
        return map_tensors(torch.clone, self.outputs)

    def backward(self, gradients: Gradients) -> Tensors:
        """Replay B or I, and return copies of the gradients of the inputs.

        Without outputs, the gradients are those of the loss, which is not here.
        """
        if self.output_gradients:
            _put(self.output_gradients, gradients)
        self.graphs[Kind.I if Kind.I in self.graphs else Kind.B].replay()
        return tuple(tensor.clone() for tensor in self.input_gradients)

    def backward_weight(self) -> None:
        """Replay W."""
        self.graphs[Kind.W].replay()


@dataclass(slots=True)
class _EagerStrip:
    """A strip of a made-up image, which runs eagerly or is captured.

    On the last stage, backward begins at the outputs that the loss takes.
    """

    stage: StreamedStage
    index: int
    is_last: bool
    is_split: bool
    flags: Sequence[bool] = ()

    def forward(self, inputs: Sequence[Tensor]) -> Any:
        """Run the strip, and return its outputs, or on the last stage those that the loss takes."""
        ends: list[Any] = []

        def end(outputs: Any) -> Tensors:
            tensors = tuple(tensors_in(outputs))
            self.flags = [tensor.requires_grad for tensor in tensors]
            ends.append(map_tensors(Tensor.detach, outputs))
            return tensors

        loss: Any = end if self.is_last else None
        outputs = self.stage.forward(self.index, inputs, loss, self.is_split)
        if ends:
            return ends[0]
        self.flags = [True] * len(outputs)
        return outputs

    def backward(self, gradients: Gradients) -> Tensors:
        """Return the gradients of the inputs."""
        output_grads: Any = gradients
        run = self.stage.backward_input if self.is_split else self.stage.backward
        return run(self.index, output_grads)[0]

    def backward_weight(self) -> None:
        """Add the weight gradients that are apart."""
        self.stage.backward_weight(self.index)


@dataclass(slots=True)
class _Slot:
    """The memory of an image in flight; its graphs are always replayed in the order of capture.

    Those of weight gradients may come in any order, and have a pool of their own.

    Attributes:
        is_split: Whether weight gradients are apart.
        num_bytes: The bytes of all that is at fixed addresses between actions.
    """

    stage: StreamedStage
    is_split: bool
    strips: list[_Strip]
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    num_bytes: int = 0

    def capture(self, is_last: bool) -> _Slot:
        """Capture the strips of an image, compare replays with eager runs, and return the slot.

        Buffers and gradients are what they were before.

        Raises:
            NotCapturedError: An action cannot be captured, or its replay differs.
        """
        first = _SAMPLE * len(self.strips)
        layers = [
            _EagerStrip(self.stage, first + strip, is_last, self.is_split)
            for strip in range(len(self.strips))
        ]
        pairs = list(zip(self.strips, layers, strict=True))
        eager = self._play(layers)
        torch.cuda.empty_cache()  # no capture can, and the pool needs what eager runs have freed
        meters = [self._capture_forward(*pair) for pair in pairs]
        for pair in reversed(pairs):
            self._capture_backward(*pair, meters.pop())
        pool = torch.cuda.graph_pool_handle()
        for own, each in pairs if self.is_split else ():
            with capturing(self.stage, pool, Kind.W) as own.graphs[Kind.W]:
                each.backward_weight()
        for name, replayed, wanted in zip("FB", self._play(self.strips), eager, strict=True):
            compare(name, replayed, wanted)
        return self

    def _capture_forward(self, own: _Strip, layers: _EagerStrip) -> StashMeter:
        meter = self.stage.meter(layers.index, own.inputs)
        with capturing(self.stage, self.pool, Kind.F) as own.graphs[Kind.F], meter:
            own.outputs = layers.forward(own.inputs)
        own.flags = layers.flags
        around = storage_sizes([*own.inputs, *tensors_in(own.outputs)])
        self.num_bytes += sum((meter.saved | around).values())
        return meter

    def _capture_backward(self, own: _Strip, layers: _EagerStrip, meter: StashMeter) -> None:
        """Capture the backward of a strip; the meter of its forward holds what that has saved.

        So what is left for the weight gradients has other addresses.
        """
        kind = Kind.I if self.is_split else Kind.B
        with capturing(self.stage, self.pool, kind) as own.graphs[kind]:
            flags = floating_flags(own.flags, own.outputs)
            own.output_gradients = [
                torch.empty_like(output) if flag else None
                for flag, output in zip(flags, floating(own.outputs), strict=True)
            ]
            received = [gradient for gradient in own.output_gradients if gradient is not None]
            input_grads = layers.backward(own.output_gradients)
            own.input_gradients = apart(input_grads, storage_addresses(received))
        meter.held.clear()
        around = storage_sizes([*received, *own.input_gradients])
        known = storage_addresses([*own.inputs, *tensors_in(own.outputs)]) | meter.known
        left_bytes = self.stage.left_bytes(layers.index)
        new = left_bytes.keys() - known - meter.saved.keys()
        self.num_bytes += sum((around | {address: left_bytes[address] for address in new}).values())

    def _play(self, strips: Sequence[Replays]) -> tuple[list[Tensor], list[Tensor]]:
        """Return what forward and backward of an image compute, for made-up gradients."""
        modules = self.stage.modules
        buffers = list(modules.buffers())
        gradients = [weight.grad for weight in modules.parameters() if weight.grad is not None]
        before = copies([*buffers, *gradients])
        for gradient in gradients:
            gradient.data.zero_()
        outputs = [
            replays.forward(own.inputs) for replays, own in zip(strips, self.strips, strict=True)
        ]
        output_grads = [list(map(ramp, floating(strip_outputs))) for strip_outputs in outputs]
        forward = copies([*tensors_in(outputs), *buffers])
        del outputs
        input_grads = [replays.backward(output_grads.pop()) for replays in reversed(strips)]
        for replays in strips if self.is_split else ():
            replays.backward_weight()
        backward = copies([*tensors_in(input_grads), *gradients])
        restore([*buffers, *gradients], before)
        return forward, backward


class GraphedStrips(GraphedStage):
    """A stage in strips that replays CUDA graphs of its actions.

    A slot is captured with made-up rows, since the image has come no further than its first strip.
    """

    def __init__(self, stage: StreamedStage, captures: Captures, is_split: bool) -> None:
        """Take the stage, and whether weight gradients are apart for any strip."""
        super().__init__(stage, captures, is_split)
        self._streamed = stage
        self._is_last = False
        self._samples: dict[int, list[Tensor]] = {}  # rows like those of a strip, without memory
        self._free_slots: list[_Slot] | None = None  # None until the first image has ended
        self._slots: dict[int, _Slot | None] = {}  # by micro-batch
        self._num_ended: Counter[int] = Counter()  # strips, by micro-batch

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run a strip by a replay; see `Stage.forward`."""
        strip = index % self._streamed.form.strips
        rows = self._streamed.rows_of(strip, inputs)
        if self._free_slots is None:
            self._samples[strip] = [torch.empty_like(tensor, device="meta") for tensor in rows]
        self._is_last = loss is not None
        return super().forward(index, rows, loss, is_split)

    def reset(self) -> None:
        """Drop all images in flight after a failed step, and the slots that they were in."""
        super().reset()
        self._slots.clear()
        self._num_ended.clear()

    def _is_end(self, index: int) -> bool:
        return self._streamed.has_loss(index)

    def _take(self, index: int, layouts: Layouts, inputs: Sequence[Tensor]) -> _Strip | None:
        number, strip = divmod(index, self._streamed.form.strips)
        self._new_bytes[index] = None
        if strip == 0:
            self._slots[number] = self._take_slot(index)
        slot = self._slots[number]
        if slot is None:
            return None
        self._new_bytes[index] = self._new_bytes[index] or 0
        return slot.strips[strip]

    def _end(self, index: int) -> None:
        """Forget a strip whose backward is complete; after the last one, the slot is free."""
        del self._flights[index]
        number = index // self._streamed.form.strips
        self._num_ended[number] += 1
        if self._num_ended[number] == self._streamed.form.strips:
            del self._num_ended[number]
            slot = self._slots.pop(number)
            self._free_slots = self._free_slots or []
            self._free_slots += [] if slot is None else [slot]

    def _take_slot(self, index: int) -> _Slot | None:
        """Return a free slot, or a new one; None if the image must run eagerly."""
        if self._free_slots is None or self._captures.is_refused or self._streamed.is_watched:
            return None
        if self._free_slots:
            return self._free_slots.pop()
        if not self._captures.may_capture(self._streamed.modules):
            return None
        mixed = mixed_layers(self._streamed)
        strips = [
            _Strip(tuple(map(_made_up, sample, repeat(self._streamed.device))), mixed)
            for _, sample in sorted(self._samples.items())
        ]
        slot = _Slot(self._streamed, self._is_split, strips)
        if self._captures.attempt(partial(slot.capture, self._is_last)) is None:
            self._streamed.forget_image(_SAMPLE)
            return None
        self._new_bytes[index] = slot.num_bytes
        return slot


def _made_up(like: Tensor, device: torch.device) -> Tensor:
    tensor = torch.zeros_like(like, device=device)
    return tensor.copy_(ramp(tensor)) if tensor.is_floating_point() else tensor


def _put(statics: Gradients, tensors: Gradients) -> None:
    for static, tensor in zip(statics, tensors, strict=True):
        if static is not None:
            static.data.zero_() if tensor is None else static.data.copy_(tensor)

"""Stages in strips whose actions are CUDA graphs: one for each strip of an image in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gems.autograd.outputs import map_tensors, tensors_in
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.graphed import Captures
from gems.engine.stages.layer_graphs import (
    Gradients,
    LossPass,
    capturing,
    compare,
    copies,
    floating_flags,
    mixed_layers,
    restore,
)
from gems.engine.stages.streamed import StreamedStage
from gems.engine.stages.wrappers import WrappedStage
from gems.schedule.action import Kind


class _Ends(torch.autograd.Function):
    """Stands for a loss: its backward passes on the gradients of the outputs from elsewhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Callable[..., Any], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        return None, None, *ctx.gradients(gradient)


@dataclass(slots=True)
class _Strip:
    """The graphs of a strip, and the tensors that they read and write."""

    inputs: Tensors
    outputs: Tensors = ()
    output_gradients: Tensors = ()
    input_gradients: Tensors = ()
    graphs: dict[Kind, torch.cuda.CUDAGraph] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    """The memory of an image in flight; its graphs are always replayed in the order of capture.

    Attributes:
        number: Stands for a micro-batch in the stage that is captured; negative, unlike others.
        outputs: On the last stage, the outputs of the image.
        flags: Whether each of these has a gradient.
        output_gradients: The gradients of those that have.
        is_known: Whether all strips are captured and compared.
    """

    number: int
    pool: Any
    strips: dict[int, _Strip] = field(default_factory=dict)
    outputs: Any = None
    flags: tuple[bool, ...] = ()
    output_gradients: list[Tensor] = field(default_factory=list)
    loss: LossPass | None = None
    is_known: bool = False

    def end(self, outputs: Any) -> Tensor:
        """Stand for the loss in a capture: keep outputs, and take gradients from here."""
        tensors = list(tensors_in(outputs))
        self.flags = tuple(tensor.requires_grad for tensor in tensors)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        self.outputs = map_tensors(Tensor.detach, outputs)
        self.output_gradients = [torch.empty_like(tensor) for tensor in wanted]
        return _end(tensors[0].new_zeros(()), lambda _: self.output_gradients, wanted)

    def watch(self, loss: Loss, outputs: Any) -> Tensor:
        """Run the loss of an eager run, and keep the gradients that it gives."""
        tensors = list(tensors_in(outputs))
        self.loss = LossPass.forward(loss, map_tensors(Tensor.detach, outputs), self.flags)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        return _end(self.loss.value, self.receive, wanted)

    def receive(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward of the loss, and return the gradients of the outputs that want one."""
        assert self.loss is not None
        floating = floating_flags(self.flags, self.outputs)
        found = zip(self.loss.backward(gradients), floating, strict=True)
        wanted = [gradient for gradient, flag in found if flag]
        _put(self.output_gradients, wanted)
        return self.output_gradients


class GraphedStrips(WrappedStage):
    """A stage in strips that replays CUDA graphs of its actions; see `GraphedStage`.

    The first image of a slot runs both ways, strip by strip, and its eager results are used, which
    takes the memory of one more image for that time.
    """

    def __init__(self, stage: StreamedStage, captures: Captures) -> None:
        super().__init__(stage)
        self._streamed = stage
        self._captures = captures
        self._num_slots = 0
        self._free: list[_Slot] | None = None  # None until the first image has ended
        self._slots: dict[int, _Slot | None] = {}  # by micro-batch
        self._rows: dict[int, Tensors] = {}  # by strip
        self._mixed = mixed_layers(stage)

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run a strip by a replay; see `Stage.forward`."""
        number, strip = divmod(index, self._streamed.form.strips)
        if strip == 0:
            self._slots[number] = self._take(is_split)
        slot = self._slots[number]
        if slot is None:
            return self.stage.forward(index, inputs, loss, is_split)
        rows = self._streamed.rows_of(strip, inputs)
        if not slot.is_known:
            return self._first_forward(slot, index, rows, loss)
        self._rows[index] = rows
        outputs = self._replay_forward(slot, strip, rows)
        if loss is None:
            return tuple(tensor.clone() for tensor in outputs)
        if self._is_last(strip):
            whole = map_tensors(torch.clone, slot.outputs)
            slot.loss = LossPass.forward(loss, whole, slot.flags)
        return ()

    def recompute(self, index: int, loss: Loss | None = None) -> None:
        """Do nothing: forward has kept its graph."""

    def backward(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Run the backward of a strip by a replay; see `Stage.backward`."""
        number, strip = divmod(index, self._streamed.form.strips)
        slot = self._slots[number]
        if slot is None:
            results = self.stage.backward(index, gradients)
        elif not slot.is_known:
            results = self._first_backward(slot, index, gradients)
        else:
            if slot.loss is None:
                _put(slot.strips[strip].output_gradients, gradients)
            elif self._is_last(strip):
                slot.receive(gradients)
            replayed = self._replay_backward(slot, strip)
            results = tuple(tensor.clone() for tensor in replayed), self._rows.pop(index)
        if strip == 0:
            self._end(number)
        return results

    def reset(self) -> None:
        """Drop all images in flight after a failed step, and the slots that they were in."""
        self.stage.reset()
        self._slots.clear()
        self._rows.clear()

    @property
    def num_in_flight(self) -> int:
        """Return the number of strips whose backward is not complete."""
        return int(self.stage.num_in_flight) + len(self._rows)

    def _is_last(self, strip: int) -> bool:
        return strip == self._streamed.form.strips - 1

    def _take(self, is_split: bool) -> _Slot | None:
        if is_split:
            self._captures.refuse("weight gradients of strips are computed apart")
        if self._free is None or self._captures.is_refused or self._streamed.is_watched:
            return None
        if self._free:
            return self._free.pop()
        if not self._captures.may_capture(self._streamed.modules):
            return None
        self._num_slots += 1
        return _Slot(-self._num_slots, torch.cuda.graph_pool_handle())

    def _end(self, number: int) -> None:
        slot = self._slots.pop(number)
        self._free = self._free or []
        if slot is None:
            return
        if self._captures.is_refused:
            self._streamed.forget_image(slot.number)
        else:
            slot.is_known = True
            self._free.append(slot)

    def _index_in(self, slot: _Slot, strip: int) -> int:
        return slot.number * self._streamed.form.strips + strip

    def _replay_forward(self, slot: _Slot, strip: int, rows: Sequence[Tensor]) -> Tensors:
        own = slot.strips[strip]
        _put(own.inputs, rows)
        for mixed in self._mixed:
            mixed.refresh()
        own.graphs[Kind.F].replay()
        return own.outputs

    def _replay_backward(self, slot: _Slot, strip: int) -> Tensors:
        own = slot.strips[strip]
        own.graphs[Kind.B].replay()
        return own.input_gradients

    def _first_forward(self, slot: _Slot, index: int, rows: Tensors, loss: Loss | None) -> Tensors:
        """Capture and replay the forward of a strip, and run it eagerly too."""
        strip = index % self._streamed.form.strips
        buffers = list(self._streamed.modules.buffers())
        before = copies(buffers)
        end = None if loss is None else slot.end
        replayed: list[Tensor] = []

        def capture() -> None:
            own = slot.strips[strip] = _Strip(tuple(torch.empty_like(each) for each in rows))
            place = self._index_in(slot, strip)
            with capturing(self._streamed, slot.pool, Kind.F) as own.graphs[Kind.F]:
                own.outputs = self.stage.forward(place, own.inputs, end)
            replayed.extend(copies([*self._replay_forward(slot, strip, rows), *buffers]))

        self._captures.attempt(capture)
        restore(buffers, before)
        watch = loss if loss is None or self._captures.is_refused else partial(slot.watch, loss)
        results: Tensors = self.stage.forward(index, rows, watch)
        self._compare(Kind.F, replayed, [*results, *buffers])
        return results

    def _first_backward(
        self, slot: _Slot, index: int, gradients: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Run the backward of a strip eagerly, then capture and replay it, and compare."""
        strip = index % self._streamed.form.strips
        state = [each.grad for each in self._streamed.modules.parameters() if each.grad is not None]
        before = copies(state)
        results: tuple[Tensors, Tensors] = self.stage.backward(index, gradients)
        eager = copies(state)
        replayed: list[Tensor] = []

        def capture() -> None:
            own = slot.strips[strip]
            own.output_gradients = tuple(torch.empty_like(each) for each in gradients)
            place = self._index_in(slot, strip)
            with capturing(self._streamed, slot.pool, Kind.B) as own.graphs[Kind.B]:
                own.input_gradients, _ = self.stage.backward(place, own.output_gradients)
            _put(own.output_gradients, gradients)
            restore(state, before)
            replayed.extend(copies([*self._replay_backward(slot, strip), *state]))

        self._captures.attempt(capture)
        restore(state, eager)
        self._compare(Kind.B, replayed, [*results[0], *eager])
        return results

    def _compare(self, kind: Kind, replayed: Sequence[Tensor], eager: Sequence[Tensor]) -> None:
        if replayed:
            self._captures.attempt(partial(compare, kind, replayed, eager))


def _end(value: Tensor, gradients: Callable[..., Any], outputs: Sequence[Tensor]) -> Tensor:
    found: Tensor = _Ends.apply(value, gradients, *outputs)  # type: ignore[no-untyped-call]
    return found


def _put(statics: Sequence[Tensor], tensors: Gradients) -> None:
    for static, tensor in zip(statics, tensors, strict=True):
        static.data.zero_() if tensor is None else static.data.copy_(tensor)

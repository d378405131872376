"""Stages in strips whose actions are CUDA graphs: one for each strip of an image in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from gems.autograd.mixed import Mixed
from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.storages import StashMeter, storage_addresses, storage_sizes
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.graphed import Captures
from gems.engine.stages.layer_graphs import (
    Gradients,
    LossPass,
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
from gems.engine.stages.wrappers import WrappedStage
from gems.schedule.action import Kind

_SAMPLE = -1  # stands for a micro-batch in a capture


@dataclass(slots=True)
class _Strip:
    """The graphs of a strip, and the tensors that they read and write.

    On the last stage, the last strip has the outputs of the image, and the others have none.
    `flags` say which of them have a gradient.
    """

    inputs: Tensors
    outputs: Any = ()
    flags: Sequence[bool] = ()
    output_gradients: Gradients = ()
    input_gradients: Tensors = ()
    graphs: dict[Kind, torch.cuda.CUDAGraph] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    """The memory of an image in flight; its graphs are always replayed in the order of capture.

    Those of weight gradients may come in any order, and have a pool of their own.

    Attributes:
        is_last: Whether the stage is the last one.
        is_split: Whether weight gradients are apart.
        loss: On the last stage, the loss of the image.
        num_bytes: The bytes of all that is at fixed addresses between actions.
    """

    stage: StreamedStage
    is_last: bool
    is_split: bool
    strips: list[_Strip]
    mixed: list[Mixed]
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    pool_of_weights: Any = field(default_factory=torch.cuda.graph_pool_handle)
    loss: LossPass | None = None
    num_bytes: int = 0

    def capture(self) -> _Slot:
        """Capture the strips of an image, compare replays with eager runs, and return the slot.

        Buffers and gradients are what they were before.

        Raises:
            NotCapturedError: An action cannot be captured, or its replay differs.
        """
        eager = self._play(self._run, self._run_backward, self._run_weights)
        torch.cuda.empty_cache()  # no capture can, and the pool needs what eager runs have freed
        meters = [self._capture_forward(strip) for strip in range(len(self.strips))]
        for strip in reversed(range(len(self.strips))):
            self._capture_backward(strip, meters.pop())
        for strip, own in enumerate(self.strips if self.is_split else ()):
            with capturing(self.stage, self.pool_of_weights, Kind.W) as own.graphs[Kind.W]:
                self._run_weights(strip)
        replayed = self._play(self.forward, self.backward, self.backward_weight)
        for name, mine, wanted in zip(("F", self._backward_kind), replayed, eager, strict=True):
            compare(name, mine, wanted)
        return self

    def forward(self, strip: int, rows: Sequence[Tensor]) -> Any:
        """Replay the forward of a strip, and return copies of its outputs."""
        own = self.strips[strip]
        _put(own.inputs, rows)
        for mixed in self.mixed:
            mixed.refresh()
        own.graphs[Kind.F].replay()
        return map_tensors(torch.clone, own.outputs)

    def backward(self, strip: int, gradients: Gradients) -> Tensors:
        """Replay the backward of a strip, and return copies of the gradients of its inputs."""
        own = self.strips[strip]
        _put(own.output_gradients, gradients)
        own.graphs[self._backward_kind].replay()
        return tuple(tensor.clone() for tensor in own.input_gradients)

    def backward_weight(self, strip: int) -> None:
        """Replay the weight gradients of a strip."""
        self.strips[strip].graphs[Kind.W].replay()

    @property
    def _backward_kind(self) -> Kind:
        return Kind.I if self.is_split else Kind.B

    def _capture_forward(self, strip: int) -> StashMeter:
        own = self.strips[strip]
        meter = self.stage.meter(self._index(strip), own.inputs)
        with capturing(self.stage, self.pool, Kind.F) as own.graphs[Kind.F], meter:
            own.outputs = self._run(strip, own.inputs)
        around = storage_sizes([*own.inputs, *tensors_in(own.outputs)])
        self.num_bytes += sum((meter.saved | around).values())
        return meter

    def _capture_backward(self, strip: int, meter: StashMeter) -> None:
        """Capture the backward of a strip; the meter of its forward holds what that has saved.

        So what is left for the weight gradients has other addresses.
        """
        own = self.strips[strip]
        kind = self._backward_kind
        with capturing(self.stage, self.pool, kind) as own.graphs[kind]:
            flags = floating_flags(own.flags, own.outputs)
            own.output_gradients = [
                torch.empty_like(output) if flag else None
                for flag, output in zip(flags, floating(own.outputs), strict=True)
            ]
            made = self._run_backward(strip, own.output_gradients)
            received = [each for each in own.output_gradients if each is not None]
            own.input_gradients = _apart(made, storage_addresses(received))
        around = storage_sizes([*received, *own.input_gradients])
        self.num_bytes += sum(around.values())
        known = storage_addresses([*own.inputs, *tensors_in(own.outputs)])
        left = self.stage.left_bytes(self._index(strip))
        for address in left.keys() - around.keys() - known - meter.known - meter.saved.keys():
            self.num_bytes += left[address]

    def _play(
        self,
        forward: Callable[[int, Tensors], Any],
        backward: Callable[[int, Gradients], Tensors],
        backward_weight: Callable[[int], None],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what forward and backward of an image compute, for made-up gradients."""
        modules = self.stage.modules
        buffers = list(modules.buffers())
        gradients = [each.grad for each in modules.parameters() if each.grad is not None]
        before = copies([*buffers, *gradients])
        for gradient in gradients:
            gradient.data.zero_()
        outputs = [forward(strip, own.inputs) for strip, own in enumerate(self.strips)]
        given = [list(map(ramp, floating(each))) for each in outputs]
        made = copies([*tensors_in(outputs), *buffers])
        del outputs
        found = [backward(strip, given[strip]) for strip in reversed(range(len(given)))]
        for strip in range(len(self.strips) if self.is_split else 0):
            backward_weight(strip)
        made_back = copies([*tensors_in(found), *gradients])
        restore([*buffers, *gradients], before)
        return made, made_back

    def _index(self, strip: int) -> int:
        return _SAMPLE * len(self.strips) + strip

    def _run(self, strip: int, rows: Tensors) -> Any:
        """Run a strip; on the last stage, return the outputs of the image at its end."""
        own = self.strips[strip]
        found: Any = None

        def end(outputs: Any) -> Tensors:
            """Stand for the loss: backward begins at the outputs."""
            nonlocal found
            tensors = tuple(tensors_in(outputs))
            own.flags = [each.requires_grad for each in tensors]
            found = map_tensors(Tensor.detach, outputs)
            return tensors

        loss: Any = end if self.is_last else None
        passed = self.stage.forward(self._index(strip), rows, loss, self.is_split)
        if found is None:
            own.flags = [True] * len(passed)
            return passed
        return found

    def _run_backward(self, strip: int, gradients: Gradients) -> Tensors:
        run = self.stage.backward_input if self.is_split else self.stage.backward
        given: Any = gradients
        return run(self._index(strip), given)[0]

    def _run_weights(self, strip: int) -> None:
        self.stage.backward_weight(self._index(strip))


class GraphedStrips(WrappedStage):
    """A stage in strips that replays CUDA graphs of its actions; see `GraphedStage`.

    A slot is captured with made-up rows, since the image has come no further than its first strip.
    """

    def __init__(self, stage: StreamedStage, captures: Captures, is_split: bool) -> None:
        """Take the stage, and whether weight gradients are apart for any strip."""
        super().__init__(stage)
        self._is_split = is_split
        self._streamed = stage
        self._captures = captures
        self._samples: dict[int, list[Tensor]] = {}  # rows like those of a strip, without memory
        self._free: list[_Slot] | None = None  # None until the first image has ended
        self._slots: dict[int, _Slot | None] = {}  # by micro-batch
        self._new_bytes: dict[int, int | None] = {}  # likewise; None: the image runs eagerly
        self._rows: dict[int, Tensors] = {}  # by strip
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
        number, strip = divmod(index, self._streamed.form.strips)
        rows = self._streamed.rows_of(strip, inputs)
        if strip == 0:
            self._slots[number] = self._take(number, loss is not None)
        slot = self._slots[number]
        if slot is None:
            self._samples[strip] = [torch.empty_like(each, device="meta") for each in rows]
            return self.stage.forward(index, rows, loss, is_split)
        self._rows[index] = rows
        outputs = slot.forward(strip, rows)
        if loss is None:
            return tuple(outputs)
        if strip == self._streamed.form.strips - 1:
            slot.loss = LossPass.forward(loss, outputs, slot.strips[strip].flags)
        return ()

    def recompute(
        self, index: int, loss: Loss | None = None, images: Sequence[Tensor] = ()
    ) -> None:
        """Do nothing: forward has kept its graph."""

    def backward(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Run the backward of a strip by a replay; see `Stage.backward`."""
        results = self._backward(self.stage.backward, index, gradients)
        number, strip = divmod(index, self._streamed.form.strips)
        slot = self._slots[number]
        if slot is not None and self._is_split:
            slot.backward_weight(strip)
        self._end(number)
        return results

    def backward_input(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Compute the input gradients by a replay; see `Stage.backward_input`."""
        return self._backward(self.stage.backward_input, index, gradients)

    def backward_weight(self, index: int) -> None:
        """Add the weight gradients by a replay; see `Stage.backward_weight`."""
        number, strip = divmod(index, self._streamed.form.strips)
        slot = self._slots[number]
        if slot is None:
            self.stage.backward_weight(index)
        else:
            slot.backward_weight(strip)
        self._end(number)

    def brought_bytes(self, index: int) -> int:
        """Return the bytes of the slot that an image has made, or what an eager strip brings."""
        number, strip = divmod(index, self._streamed.form.strips)
        new_bytes = self._new_bytes[number]
        if new_bytes is None:
            return self.stage.brought_bytes(index)
        return 0 if strip else new_bytes

    def kept_bytes(self, index: int) -> int:
        """Return what a backward frees: nothing, unless it is eager."""
        return self.stage.kept_bytes(index) if self._is_eager(index) else 0

    def held_bytes(self, index: int) -> int:
        """Return what an eager backward left for the weight gradients."""
        return self.stage.held_bytes(index) if self._is_eager(index) else 0

    def reset(self) -> None:
        """Drop all images in flight after a failed step, and the slots that they were in."""
        self.stage.reset()
        self._slots.clear()
        self._rows.clear()
        self._num_ended.clear()

    @property
    def num_in_flight(self) -> int:
        """Return the number of strips whose backward is not complete."""
        return int(self.stage.num_in_flight) + len(self._rows)

    def _is_eager(self, index: int) -> bool:
        return self._new_bytes[index // self._streamed.form.strips] is None

    def _backward(
        self,
        run: Callable[[int, Sequence[Tensor]], tuple[Tensors, Tensors]],
        index: int,
        gradients: Sequence[Tensor],
    ) -> tuple[Tensors, Tensors]:
        number, strip = divmod(index, self._streamed.form.strips)
        slot = self._slots[number]
        if slot is None:
            return run(index, gradients)
        given: Gradients = gradients
        if slot.is_last:
            given = () if slot.loss is None else slot.loss.backward(gradients)
            slot.loss = None
        return slot.backward(strip, given), self._rows.pop(index)

    def _end(self, number: int) -> None:
        """Note that the backward of a strip is complete; after the last, the slot is free."""
        self._num_ended[number] += 1
        if self._num_ended[number] == self._streamed.form.strips:
            del self._num_ended[number]
            slot = self._slots.pop(number)
            self._free = self._free or []
            self._free += [] if slot is None else [slot]

    def _take(self, number: int, is_last: bool) -> _Slot | None:
        """Return a free slot, or a new one; None if the image must run eagerly."""
        self._new_bytes[number] = None
        if self._free is None or self._captures.is_refused or self._streamed.is_watched:
            return None
        if self._free:
            self._new_bytes[number] = 0
            return self._free.pop()
        if not self._captures.may_capture(self._streamed.modules):
            return None
        strips = [
            _Strip(tuple(map(_made_up, self._samples[strip], repeat(self._streamed.device))))
            for strip in range(self._streamed.form.strips)
        ]
        mixed = mixed_layers(self._streamed)
        slot = _Slot(self._streamed, is_last, self._is_split, strips, mixed)
        if self._captures.attempt(slot.capture) is None:
            self._streamed.forget_image(_SAMPLE)
            return None
        self._new_bytes[number] = slot.num_bytes
        return slot


def _made_up(like: Tensor, device: torch.device) -> Tensor:
    made = torch.zeros_like(like, device=device)
    return made.copy_(ramp(made)) if made.is_floating_point() else made


def _apart(tensors: Sequence[Tensor], known: set[int]) -> Tensors:
    """Return tensors, copied where their memory is known, or not theirs alone."""
    found = []
    for tensor in tensors:
        memory = tensor.untyped_storage()
        is_own = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in known
        found.append(tensor if is_own else tensor.clone())
        known.add(memory.data_ptr())
    return tuple(found)


def _put(statics: Gradients, tensors: Gradients) -> None:
    for static, tensor in zip(statics, tensors, strict=True):
        if static is not None:
            static.data.zero_() if tensor is None else static.data.copy_(tensor)

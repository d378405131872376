"""Stages in strips whose actions are CUDA graphs: one for each strip of an image in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from gems.autograd.mixed import Mixed
from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.storages import StashMeter, storage_addresses, storage_sizes, tensor_bytes
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

    Attributes:
        is_last: Whether the stage is the last one.
        loss: On the last stage, the loss of the image.
        num_bytes: The bytes of all that is at fixed addresses between actions.
    """

    stage: StreamedStage
    is_last: bool
    pool: Any
    strips: list[_Strip]
    mixed: list[Mixed]
    loss: LossPass | None = None
    num_bytes: int = 0

    def capture(self) -> _Slot:
        """Capture the strips of an image, compare replays with eager runs, and return the slot.

        Buffers and gradients are what they were before.

        Raises:
            NotCapturedError: An action cannot be captured, or its replay differs.
        """
        eager = self._play(self._run, self._run_backward)
        torch.cuda.empty_cache()  # no capture can, and the pool needs what eager runs have freed
        for strip, own in enumerate(self.strips):
            with self._capturing(strip, Kind.F), self._meter(strip) as meter:
                own.outputs = self._run(strip, own.inputs)
            around = storage_sizes([*own.inputs, *tensors_in(own.outputs)])
            self.num_bytes += sum((meter.saved | around).values())
        for strip, own in reversed(list(enumerate(self.strips))):
            with self._capturing(strip, Kind.B):
                flags = floating_flags(own.flags, own.outputs)
                own.output_gradients = [
                    torch.empty_like(output) if flag else None
                    for flag, output in zip(flags, floating(own.outputs), strict=True)
                ]
                made = self._run_backward(strip, own.output_gradients)
                received = [each for each in own.output_gradients if each is not None]
                own.input_gradients = _apart(made, storage_addresses(received))
            self.num_bytes += tensor_bytes([*received, *own.input_gradients])
        replayed = self._play(self.forward, self.backward)
        for name, mine, wanted in zip("FB", replayed, eager, strict=True):
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
        own.graphs[Kind.B].replay()
        return tuple(tensor.clone() for tensor in own.input_gradients)

    def _play(
        self, forward: Callable[[int, Tensors], Any], backward: Callable[[int, Gradients], Tensors]
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
        made_back = copies([*tensors_in(found), *gradients])
        restore([*buffers, *gradients], before)
        return made, made_back

    def _index(self, strip: int) -> int:
        return _SAMPLE * len(self.strips) + strip

    def _meter(self, strip: int) -> StashMeter:
        return self.stage.meter(self._index(strip), self.strips[strip].inputs)

    @contextmanager
    def _capturing(self, strip: int, kind: Kind) -> Iterator[None]:
        with capturing(self.stage, self.pool, kind) as self.strips[strip].graphs[kind]:
            yield

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
        passed = self.stage.forward(self._index(strip), rows, loss)
        if found is None:
            own.flags = [True] * len(passed)
            return passed
        return found

    def _run_backward(self, strip: int, gradients: Gradients) -> Tensors:
        given: Any = gradients
        return self.stage.backward(self._index(strip), given)[0]


class GraphedStrips(WrappedStage):
    """A stage in strips that replays CUDA graphs of its actions; see `GraphedStage`.

    A slot is captured with made-up rows, since the image has come no further than its first strip.
    """

    def __init__(self, stage: StreamedStage, captures: Captures) -> None:
        super().__init__(stage)
        self._streamed = stage
        self._captures = captures
        self._samples: dict[int, list[Tensor]] = {}  # rows like those of a strip, without memory
        self._free: list[_Slot] | None = None  # None until the first image has ended
        self._slots: dict[int, _Slot | None] = {}  # by micro-batch
        self._new_bytes: dict[int, int | None] = {}  # likewise; None: the image runs eagerly
        self._rows: dict[int, Tensors] = {}  # by strip

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
            self._slots[number] = self._take(number, loss is not None, is_split)
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
        number, strip = divmod(index, self._streamed.form.strips)
        slot = self._slots[number]
        if slot is None:
            results = self.stage.backward(index, gradients)
        else:
            given: Gradients = gradients
            if slot.is_last:
                given = () if slot.loss is None else slot.loss.backward(gradients)
                slot.loss = None
            results = slot.backward(strip, given), self._rows.pop(index)
        if strip == 0:
            self._free = self._free or []
            self._free += [] if slot is None else [slot]
            del self._slots[number]
        return results

    def brought_bytes(self, index: int) -> int:
        """Return the bytes of the slot that an image has made, or what an eager strip brings."""
        number, strip = divmod(index, self._streamed.form.strips)
        new_bytes = self._new_bytes[number]
        if new_bytes is None:
            return self.stage.brought_bytes(index)
        return 0 if strip else new_bytes

    def kept_bytes(self, index: int) -> int:
        """Return what a backward frees: nothing, unless it is eager."""
        is_eager = self._new_bytes[index // self._streamed.form.strips] is None
        return self.stage.kept_bytes(index) if is_eager else 0

    def reset(self) -> None:
        """Drop all images in flight after a failed step, and the slots that they were in."""
        self.stage.reset()
        self._slots.clear()
        self._rows.clear()

    @property
    def num_in_flight(self) -> int:
        """Return the number of strips whose backward is not complete."""
        return int(self.stage.num_in_flight) + len(self._rows)

    def _take(self, number: int, is_last: bool, is_split: bool) -> _Slot | None:
        """Return a free slot, or a new one; None if the image must run eagerly."""
        self._new_bytes[number] = None
        if is_split:
            self._captures.refuse("weight gradients of strips are computed apart")
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
        pool = torch.cuda.graph_pool_handle()
        slot = _Slot(self._streamed, is_last, pool, strips, mixed_layers(self._streamed))
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

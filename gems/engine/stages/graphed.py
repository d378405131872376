"""Stages whose actions are CUDA graphs, in as many slots as micro-batches in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.layer_graphs import (
    Gradients,
    LayerGraphs,
    LossPass,
    NotCapturedError,
    Pass,
    last_output,
    layouts_of,
)
from gems.engine.stages.whole import WholeStage
from gems.engine.stages.wrappers import WrappedStage

_log = logging.getLogger(__name__)

Layouts = tuple[Any, ...]
Made = TypeVar("Made")


@dataclass(slots=True)
class Captures:
    """Captures the layers of a stage, until one cannot be captured; the reason is named once.

    Attributes:
        name: The stage, for the message.
        is_drawing: Tells which layers draw random numbers.
        told: The reasons that were given so far, also of other segments of the stage.
    """

    name: str
    is_drawing: Callable[[nn.Module], bool]
    told: set[str] = field(default_factory=set)
    is_refused: bool = False

    def capture(self, source: Pass, sample: Sequence[Tensor], pool: Any) -> LayerGraphs | None:
        """Return the graphs of a forward and its backward, or None if there can be none."""
        if not self.may_capture(source.stage.modules):
            return None
        return self.attempt(partial(LayerGraphs.capture, source, sample, pool))

    def attempt(self, call: Callable[[], Made]) -> Made | None:
        """Return what a capture or a comparison gives, or refuse; None after a refusal."""
        if self.is_refused:
            return None
        try:
            return call()
        except NotCapturedError as error:
            self.refuse(str(error))
            return None

    def may_capture(self, layers: nn.ModuleList) -> bool:
        """Return whether nothing is known that keeps these layers from being captured."""
        drawing = next(filter(self.is_drawing, layers), None)
        if drawing is not None:
            kind = type(drawing).__name__
            self.refuse(f"{kind} draws random numbers, from a seed of each micro-batch")
        return not self.is_refused

    def refuse(self, reason: str) -> None:
        """Capture nothing from now on."""
        self.is_refused = True
        if reason not in self.told:
            self.told.add(reason)
            _log.warning("%s runs without CUDA graphs: %s", self.name, reason)


class Replays(Protocol):
    """The graphs of one forward and its backward: `LayerGraphs`, or those of a strip."""

    @property
    def flags(self) -> Sequence[bool]:
        """Return which outputs have a gradient."""

    def forward(self, inputs: Sequence[Tensor]) -> Any:
        """Replay F, and return copies of its outputs."""

    def backward(self, gradients: Gradients) -> Gradients:
        """Replay B or I, and return copies of the gradients of the inputs."""

    def backward_weight(self) -> None:
        """Replay W."""


@dataclass(slots=True)
class _Flight:
    """A micro-batch from its forward to the end of its backward; without graphs it runs eagerly."""

    layouts: Layouts
    graphs: Replays | None
    inputs: Tensors
    loss: LossPass | None = None


class GraphedStage(WrappedStage):
    """A stage that replays CUDA graphs of its actions.

    A slot is the memory of one micro-batch in flight: its graphs, and the tensors at fixed
    addresses that they read and write. It is taken at F and free again after the backward.
    Micro-batches run eagerly until the first backward has ended, for the kernels are chosen then.
    """

    def __init__(self, stage: WholeStage, captures: Captures, is_split: bool = False) -> None:
        """Take the stage, and whether weight gradients are apart for any micro-batch.

        Then the graphs of all are split, so that any slot fits.
        """
        super().__init__(stage)
        self._is_split = is_split
        self._whole = stage
        self._captures = captures
        self._free: dict[Layouts, list[Replays]] = {}  # a key: its first backward has ended
        self._flights: dict[int, _Flight] = {}
        self._new_bytes: dict[int, int | None] = {}  # of slots made; None: the index runs eagerly
        self._inferred: tuple[Layouts, LayerGraphs | None] = (), None

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run the layers by a replay; see `Stage.forward`."""
        layouts = layouts_of(inputs)
        graphs = self._take(index, layouts, inputs)
        flight = self._flights[index] = _Flight(layouts, graphs, tuple(inputs))
        if graphs is None:
            return self.stage.forward(index, inputs, loss, is_split)
        outputs = graphs.forward(inputs)
        if loss is None or not self._is_end(index):
            return as_tuple(outputs)
        flight.loss = LossPass.forward(loss, outputs, graphs.flags)
        return (flight.loss.value,)

    def recompute(
        self, index: int, loss: Loss | None = None, images: Sequence[Tensor] = ()
    ) -> None:
        """Do nothing: forward has kept its graph."""

    def backward(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Run the backward by a replay; see `Stage.backward`."""
        results = self._backward(self.stage.backward, index, gradients)
        graphs = self._flights[index].graphs
        if graphs is not None and self._is_split:
            graphs.backward_weight()
        self._end(index)
        return results

    def backward_input(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Compute the input gradients by a replay; see `Stage.backward_input`."""
        return self._backward(self.stage.backward_input, index, gradients)

    def backward_weight(self, index: int) -> None:
        """Add the weight gradients by a replay; see `Stage.backward_weight`."""
        graphs = self._flights[index].graphs
        if graphs is None:
            self.stage.backward_weight(index)
        else:
            graphs.backward_weight()
        self._end(index)

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the layers for evaluation by a replay; see `Stage.infer`.

        They are captured anew if the weights are other tensors, such as averages.
        """
        weights = (parameter.data_ptr() for parameter in self.stage.modules.parameters())
        layouts = (self.stage.modules.training, *layouts_of(inputs), *weights)
        if layouts != self._inferred[0] or self._whole.is_watched or self._captures.is_refused:
            self._inferred = layouts, None
            return self.stage.infer(inputs)
        graphs = self._inferred[1]
        if graphs is None:
            source = Pass(self._whole, self.stage.infer, [False] * len(inputs))
            graphs = self._captures.capture(source, inputs, torch.cuda.graph_pool_handle())
            self._inferred = layouts, graphs
        return self.stage.infer(inputs) if graphs is None else graphs.forward(inputs)

    def still_read(self, index: int) -> set[int]:
        """Return the addresses that `backward_weight` will read; a replay reads its slot only."""
        flight = self._flights.get(index)
        is_eager = flight is None or flight.graphs is None
        return self.stage.still_read(index) if is_eager else set()

    def brought_bytes(self, index: int) -> int:
        """Return the bytes of the slot that a forward has made, or what an eager one keeps."""
        new_bytes = self._new_bytes[index]
        return self.stage.brought_bytes(index) if new_bytes is None else new_bytes

    def kept_bytes(self, index: int) -> int:
        """Return what a backward frees: nothing, unless it is eager."""
        return self.stage.kept_bytes(index) if self._new_bytes[index] is None else 0

    def held_bytes(self, index: int) -> int:
        """Return what an eager backward left for the weight gradients."""
        return self.stage.held_bytes(index) if self._new_bytes[index] is None else 0

    def reset(self) -> None:
        """Drop all micro-batches in flight after a failed step, and the slots that they were in."""
        self.stage.reset()
        self._flights.clear()

    @property
    def num_in_flight(self) -> int:
        """Return the number of micro-batches whose backward is not complete."""
        return len(self._flights)

    def _is_end(self, index: int) -> bool:
        """Return whether a loss follows this forward on the last stage."""
        return True

    def _take(self, index: int, layouts: Layouts, inputs: Sequence[Tensor]) -> Replays | None:
        """Return a free slot, or a new one; None if the micro-batch must run eagerly."""
        self._new_bytes[index] = None
        free = self._free.get(layouts)
        if free is None or self._whole.is_watched or self._captures.is_refused:
            return None
        if free:
            self._new_bytes[index] = 0
            return free.pop()
        stage = self._whole
        wanted = [tensor.is_floating_point() and not stage.is_first for tensor in inputs]
        source = Pass(stage, partial(last_output, stage), wanted, is_split=self._is_split)
        graphs = self._captures.capture(source, inputs, torch.cuda.graph_pool_handle())
        if graphs is not None:
            self._new_bytes[index] = graphs.num_bytes
        return graphs

    def _backward(
        self,
        run: Callable[[int, Sequence[Tensor]], tuple[Tensors, Tensors]],
        index: int,
        gradients: Sequence[Tensor],
    ) -> tuple[Tensors, Tensors]:
        flight = self._flights[index]
        if flight.graphs is None:
            return run(index, gradients)
        output_grads = gradients if flight.loss is None else flight.loss.backward(gradients)
        input_grads = flight.graphs.backward(output_grads)
        return tuple(gradient for gradient in input_grads if gradient is not None), flight.inputs

    def _end(self, index: int) -> None:
        """Forget a micro-batch whose backward is complete; its slot is free for the next."""
        flight = self._flights.pop(index)
        free = self._free.setdefault(flight.layouts, [])
        if flight.graphs is not None:
            free.append(flight.graphs)

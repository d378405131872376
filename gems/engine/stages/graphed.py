"""Stages whose actions are CUDA graphs, captured once for each slot and then replayed.

One replay launches all kernels of an action, where eager torch waits for Python between small ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.mixed import mixed_of
from gems.autograd.outputs import map_tensors, tensors_in
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.whole import WholeStage
from gems.engine.stages.wrappers import WrappedStage
from gems.schedule.action import Kind
from gems.streaming.compare import TOLERANCES

LOW_TOLERANCE = 5e-2  # of 16 bits, beside the tolerances of wider types

_log = logging.getLogger(__name__)

Layouts = tuple[Any, ...]


class _Received(torch.autograd.Function):
    """Stands for the loss: its backward passes on the gradients of the outputs that a slot got."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, *outputs: Tensor) -> Tensor:
        ctx.slot = slot
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.slot.output_gradients


@dataclass(slots=True)
class Slot:
    """Device memory of one micro-batch in flight: graphs, and the tensors that they read and write.

    Graphs of one memory pool must be replayed in the order in which they were captured, and those
    of different slots are not; so each slot has a pool.

    Attributes:
        outputs: The outputs of the layers; those that need a gradient are leaves that ask for one.
        output_gradients: The gradients that the backward reads.
        input_gradients: The gradients that it writes.
    """

    number: int
    inputs: Tensors
    pool: Any
    outputs: Any = None
    output_gradients: list[Tensor] = field(default_factory=list)
    input_gradients: Tensors = ()
    graphs: dict[Kind, torch.cuda.CUDAGraph] = field(default_factory=dict)

    @property
    def key(self) -> int:
        """Return the stage's index of this slot: negative, unlike those of micro-batches."""
        return -1 - self.number


@dataclass(slots=True)
class _Flight:
    """A micro-batch from its forward to the end of its backward; without a slot it runs eagerly.

    Attributes:
        loss: On the last stage, the loss and the outputs that it was computed from.
        is_checked: Whether each action also runs eagerly, and is compared.
        eager_gradients: The gradients of the outputs in the eager run of the last stage.
    """

    layouts: Layouts
    slot: Slot | None
    inputs: Tensors
    is_last: bool
    loss: tuple[Tensor, list[Tensor]] | None = None
    is_checked: bool = False
    eager_gradients: list[Tensor | None] = field(default_factory=list)


class GraphedStage(WrappedStage):
    """A stage that replays CUDA graphs of its actions, in as many slots as micro-batches in flight.

    Micro-batches run eagerly until the first backward has ended, for the kernels are chosen then.
    The first micro-batch of each slot runs both ways, and its eager results are used. If they
    differ, or if an action cannot be captured, the stage goes on eagerly and says why.

    The loss runs eagerly, for it counts metrics, and a user's may read values on the host.
    """

    def __init__(
        self, stage: WholeStage, name: str, is_drawing: Callable[[nn.Module], bool]
    ) -> None:
        """Take the stage and a function that tells which layers draw random numbers."""
        super().__init__(stage)
        self._whole = stage
        self._name = name
        self._is_drawing = is_drawing
        self._refusal: str | None = None
        self._num_slots = 0
        self._free: dict[Layouts, list[Slot]] = {}  # a key: its first backward has ended
        self._flights: dict[int, _Flight] = {}
        self._inferred: tuple[Layouts, Slot | None] = (), None
        precisions = map(mixed_of, stage.modules.modules())
        self._mixed = [mixed for mixed in precisions if mixed is not None]
        self._is_watched = False
        self._is_capturing = False
        self._poll = stage.poll
        stage.poll = self._poll_outside

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run the layers by a replay; see `Stage.forward`."""
        layouts = (is_split, *_layouts(inputs))
        slot = self._take(layouts, inputs)
        flight = _Flight(layouts, slot, tuple(inputs), loss is not None)
        self._flights[index] = flight
        if slot is None:
            return self.stage.forward(index, inputs, loss, is_split)
        if Kind.F not in slot.graphs:
            flight.is_checked = True
            return self._first_forward(index, flight, loss, is_split)
        self._replay_forward(slot, inputs)
        if loss is None:
            return tuple(tensor.clone() for tensor in slot.outputs)
        leaves: list[Tensor] = []
        outputs = map_tensors(lambda tensor: _leaf(tensor, leaves), slot.outputs)
        value = loss(outputs)
        flight.loss = value, leaves
        return (value.detach(),)

    def recompute(self, index: int, loss: Loss | None = None) -> None:
        """Do nothing: forward has kept its graph."""

    def backward(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Run the backward by a replay; see `Stage.backward`."""
        results = self._backward(Kind.B, index, gradients)
        self._end(index)
        return results

    def backward_input(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Compute the input gradients by a replay; see `Stage.backward_input`."""
        return self._backward(Kind.I, index, gradients)

    def backward_weight(self, index: int) -> None:
        """Add the weight gradients by a replay; see `Stage.backward_weight`."""
        flight = self._flights[index]
        slot = flight.slot
        if slot is None:
            self.stage.backward_weight(index)
        elif not flight.is_checked:
            slot.graphs[Kind.W].replay()
        else:
            with self._as_eagerly(slot, Kind.W, lambda: self.stage.backward_weight(index)):
                self._capture(slot, Kind.W, lambda: self.stage.backward_weight(slot.key))
        self._end(index)

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the layers for evaluation by a replay; see `Stage.infer`.

        They are captured anew if the weights are other tensors, such as averages.
        """
        weights = (each.data_ptr() for each in self.stage.modules.parameters())
        layouts = (self.stage.modules.training, *_layouts(inputs), *weights)
        is_new = layouts != self._inferred[0]
        if is_new or self._is_watched or self._refusal is not None:
            self._inferred = layouts, None
            return self.stage.infer(inputs)
        slot = self._inferred[1]
        if slot is not None:
            self._replay_forward(slot, inputs)
            return map_tensors(torch.clone, slot.outputs)
        slot = self._new_slot(inputs)

        def infer() -> None:
            slot.outputs = self.stage.infer(slot.inputs)

        is_captured = self._capture(slot, Kind.F, infer)
        eager = self.stage.infer(inputs)
        if is_captured:
            self._replay_forward(slot, inputs)
            self._compare(Kind.F, list(tensors_in(slot.outputs)), list(tensors_in(eager)))
            self._inferred = layouts, slot
        return eager

    @contextmanager
    def watched(self, watch: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
        """Run the layers eagerly, so that hooks of the modules see their outputs."""
        self._is_watched = True
        try:
            with self.stage.watched(watch):
                yield
        finally:
            self._is_watched = False

    def still_read(self, index: int) -> set[int]:
        """Return the addresses that `backward_weight` will read; a replay reads its slot only."""
        flight = self._flights.get(index)
        is_eager = flight is None or flight.slot is None or flight.is_checked
        return self.stage.still_read(index) if is_eager else set()

    def reset(self) -> None:
        """Drop all micro-batches in flight after a failed step, and the slots that they were in."""
        self.stage.reset()
        self._flights.clear()

    @property
    def num_in_flight(self) -> int:
        """Return the number of micro-batches whose backward is not complete."""
        return len(self._flights)

    def _poll_outside(self) -> None:
        if not self._is_capturing:  # a capture ends with an error if an event is asked
            self._poll()

    def _take(self, layouts: Layouts, inputs: Sequence[Tensor]) -> Slot | None:
        free = self._free.get(layouts)
        if free is None or self._is_watched or self._refusal is not None:
            return None
        if free:
            return free.pop()
        drawing = next((layer for layer in self.stage.modules if self._is_drawing(layer)), None)
        if drawing is not None:
            name = type(drawing).__name__
            self._refuse(f"{name} draws random numbers, from a seed of each micro-batch")
            return None
        return self._new_slot(inputs)

    def _new_slot(self, inputs: Sequence[Tensor]) -> Slot:
        self._num_slots += 1
        return Slot(
            self._num_slots - 1,
            tuple(torch.empty_like(tensor) for tensor in inputs),
            torch.cuda.graph_pool_handle(),
        )

    def _end(self, index: int) -> None:
        """Forget a micro-batch whose backward is complete; its slot is free for the next."""
        flight = self._flights.pop(index)
        free = self._free.setdefault(flight.layouts, [])
        if flight.slot is None:
            return
        if self._refusal is None:
            free.append(flight.slot)
        else:
            self._whole.forget(flight.slot.key)

    def _refuse(self, reason: str) -> None:
        if self._refusal is None:
            _log.warning("%s runs without CUDA graphs: %s", self._name, reason)
        self._refusal = reason
        self._free = {layouts: [] for layouts in self._free}

    def _replay_forward(self, slot: Slot, inputs: Sequence[Tensor]) -> None:
        for static, tensor in zip(slot.inputs, inputs, strict=True):
            static.data.copy_(tensor)  # the captured graph expects the version of its input
        for mixed in self._mixed:
            mixed.refresh()
        slot.graphs[Kind.F].replay()

    def _first_forward(
        self, index: int, flight: _Flight, loss: Loss | None, is_split: bool
    ) -> Tensors:
        """Capture a forward, replay it, and compare it with the eager one, whose outputs count."""
        slot = flight.slot
        assert slot is not None
        eager: list[Tensor] = []

        def watched(outputs: Any) -> Tensor:
            assert loss is not None
            return loss(map_tensors(watch, outputs))

        def watch(tensor: Tensor) -> Tensor:
            eager.append(tensor.detach())
            if not tensor.requires_grad:
                return tensor
            seen = tensor.view_as(tensor)  # gets the gradient of the loss alone
            place = len(flight.eager_gradients)
            flight.eager_gradients.append(None)
            keep = partial(flight.eager_gradients.__setitem__, place)
            seen.register_hook(keep)  # type: ignore[no-untyped-call]
            return seen

        def forward() -> None:
            outputs = self.stage.forward(
                slot.key, slot.inputs, self._ends_at(slot) if flight.is_last else None, is_split
            )
            if not flight.is_last:
                slot.outputs = outputs

        state = list(self.stage.modules.buffers())
        before = _copies(state)
        is_captured = self._capture(slot, Kind.F, forward)
        if is_captured:
            self._replay_forward(slot, flight.inputs)
        replayed = _copies([*tensors_in(slot.outputs), *state])
        _restore(state, before)
        results = self.stage.forward(
            index, flight.inputs, watched if flight.is_last else None, is_split
        )
        if is_captured:
            self._compare(Kind.F, replayed, [*(eager if flight.is_last else results), *state])
        return results

    def _ends_at(self, slot: Slot) -> Loss:
        """Return the loss of a capture: it keeps outputs in the slot and takes gradients from it."""

        def end(outputs: Any) -> Tensor:
            slot.outputs = map_tensors(lambda tensor: _leaf(tensor, []), outputs)
            wanted = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
            slot.output_gradients = [torch.empty_like(tensor) for tensor in wanted]
            if not wanted:
                return next(tensors_in(outputs)).new_zeros(())
            loss: Tensor = _Received.apply(slot, *wanted)  # type: ignore[no-untyped-call]
            return loss

        return end

    def _backward(
        self, kind: Kind, index: int, gradients: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Run B or I."""
        flight = self._flights[index]
        slot = flight.slot
        if slot is None:
            return self._run_of(kind)(index, gradients)
        if flight.is_checked:
            return self._first_backward(kind, index, gradients)
        if flight.loss is not None:
            value, leaves = flight.loss
            torch.autograd.backward(value, gradients[0])
            gradients = [_gradient(leaf) for leaf in leaves]
        for static, gradient in zip(slot.output_gradients, gradients, strict=True):
            static.data.copy_(gradient)
        slot.graphs[kind].replay()
        return tuple(tensor.clone() for tensor in slot.input_gradients), flight.inputs

    def _first_backward(
        self, kind: Kind, index: int, gradients: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Run B or I eagerly, then capture it, replay it, and compare."""
        flight = self._flights[index]
        slot = flight.slot
        assert slot is not None
        run = self._run_of(kind)
        eager: list[tuple[Tensors, Tensors]] = []

        def capture() -> None:
            slot.input_gradients, _ = run(slot.key, given)

        with self._as_eagerly(slot, kind, lambda: eager.append(run(index, gradients))) as compared:
            compared.extend(eager[0][0])
            given: Sequence[Tensor]
            if flight.is_last:
                given = (torch.ones_like(gradients[0]),)
                received = flight.eager_gradients[: len(slot.output_gradients)]
            else:
                given = slot.output_gradients = [torch.empty_like(each) for each in gradients]
                received = list(gradients)
            self._capture(slot, kind, capture)
            for static, gradient in zip(slot.output_gradients, received, strict=True):
                static.data.zero_() if gradient is None else static.data.copy_(gradient)
        return eager[0]

    def _run_of(self, kind: Kind) -> Callable[[int, Sequence[Tensor]], tuple[Tensors, Tensors]]:
        return self.stage.backward if kind is Kind.B else self.stage.backward_input

    @contextmanager
    def _as_eagerly(
        self, slot: Slot, kind: Kind, run: Callable[[], object]
    ) -> Iterator[list[Tensor]]:
        """Run a backward eagerly, then replay what the block captures, and compare.

        The eager results are kept. The block may add to the list what is compared with the slot's input gradients.
        """
        state = [each.grad for each in self.stage.modules.parameters() if each.grad is not None]
        before = _copies(state)
        run()
        eager = _copies(state)
        more: list[Tensor] = []
        yield more
        if kind not in slot.graphs:
            return
        _restore(state, before)
        slot.graphs[kind].replay()
        replayed = [*slot.input_gradients, *state] if more else state
        self._compare(kind, replayed, [*more, *eager])
        _restore(state, eager)

    def _capture(self, slot: Slot, kind: Kind, run: Callable[[], None]) -> bool:
        """Capture an action; return whether that was possible."""
        if self._refusal is not None:
            return False
        graph = torch.cuda.CUDAGraph()
        self._is_capturing = True
        graph.capture_begin(pool=slot.pool, capture_error_mode="thread_local")
        try:
            run()
        except RuntimeError as error:
            with suppress(RuntimeError):  # which names no reason
                graph.capture_end()
            self._refuse(f"{kind} cannot be captured: {str(error).splitlines()[0]}")
            return False
        finally:
            self._is_capturing = False
        graph.capture_end()
        slot.graphs[kind] = graph
        return True

    def _compare(self, kind: Kind, replayed: Sequence[Tensor], eager: Sequence[Tensor]) -> None:
        for one, other in zip(replayed, eager, strict=True):
            if not _is_close(one, other):
                self._refuse(f"the replay of {kind} differs from the same action run eagerly")
                return


def _layouts(tensors: Sequence[Tensor]) -> Layouts:
    return tuple((each.shape, each.stride(), each.dtype) for each in tensors)


def _leaf(tensor: Tensor, leaves: list[Tensor]) -> Tensor:
    """Return a tensor without its graph, which asks for a gradient if its graph did."""
    leaf = tensor.detach()
    if tensor.requires_grad:
        leaves.append(leaf.requires_grad_())
    return leaf


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _restore(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.data.copy_(copy)  # as kernels of norms do, which count no change of their statistics


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    wide = other.double()
    difference = (one.double() - wide).abs().nan_to_num(nan=0.0, posinf=0.0)
    is_alike = torch.equal(one.isfinite(), other.isfinite())
    scale = wide.abs().nan_to_num(posinf=0.0).max() if wide.numel() else 0.0
    tolerance = TOLERANCES.get(other.dtype, LOW_TOLERANCE)
    return is_alike and (not wide.numel() or bool(difference.max() <= tolerance * scale))

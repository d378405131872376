"""Stages of whole micro-batches, as they are or compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gems.autograd.compiled import compile_layers
from gems.autograd.mixed import low_copies
from gems.autograd.outputs import as_tuple, tensors_in
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.autograd.storages import (
    StashMeter,
    new_bytes,
    storage_addresses,
    storage_sizes,
    tensor_bytes,
)
from gems.autograd.torch_internals import run_engine
from gems.engine.stage import Loss, Stage, Tensors
from gems.streaming.block_plan import Box

# of a forward, and of its backward: a hook after each layer of 1 ms took 4 % of a step
POLL_EVERY_S = 0.005


class Stash(NamedTuple):
    """The remains of a forward.

    The graph is kept by its edges, so the memory of outputs is free once they are sent. `inputs`
    are the leaves, or the `SegmentInput` of a segment.
    """

    inputs: Any
    edges: tuple[GradientEdge | None, ...]
    deferred: DeferredGradients | None


class WholeStage(Stage):
    """A stage that calls its layers on whole micro-batches, and keeps their graphs."""

    def __init__(self, modules: nn.ModuleList, is_first: bool, poll: Callable[[], None]) -> None:
        self.modules = modules
        self.stash_bytes: int | None = None
        self.gives_parts = False
        self.is_watched = False
        self.is_first = is_first
        self.poll = poll
        self._stash: dict[int, Stash] = {}
        self._deferred: dict[int, DeferredGradients] = {}
        self._held_bytes: dict[int, int] = {}
        self._layers: SplitLayers | None = None

    def split_layers(self) -> SplitLayers:
        """Prepare the layers for a split backward once, and return them."""
        if self._layers is None:
            self._layers = SplitLayers(self.modules)
        return self._layers

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run the layers and keep their graph, so that nothing is run again."""
        has_gradient = not self.is_first
        leaves = tuple(
            tensor.detach().requires_grad_(has_gradient and tensor.is_floating_point())
            for tensor in inputs
        )
        deferred = DeferredGradients() if is_split else None
        with self.deferring_to(deferred):
            if self.stash_bytes is None:
                self._prepare(leaves)
                with StashMeter(self._known(leaves)) as meter:
                    outputs = self.run_layers(leaves, loss)
                self.stash_bytes = meter.saved_bytes
            else:
                outputs = self.run_layers(leaves, loss)
        self._stash[index] = Stash(leaves, gradient_edges(outputs), deferred)
        return tuple(tensor.detach() for tensor in outputs)

    def backward(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Run the backward of the graph."""
        return self._backward(index, self._stash.pop(index), gradients)

    def backward_input(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Run the backward of the graph, and defer the weight gradients."""
        stash = self._stash.pop(index)
        assert stash.deferred is not None
        with self.deferring_to(stash.deferred):
            input_grads = self._backward(index, stash, gradients)
        self._deferred[index] = stash.deferred
        alike = self._alike(index)
        if alike not in self._held_bytes:
            known = storage_addresses(self._known([*input_grads[1], *gradients]))
            self._held_bytes[alike] = new_bytes(stash.deferred.tensors(), known)
        return input_grads

    def backward_weight(self, index: int) -> None:
        """Add the weight gradients that `backward_input` deferred."""
        self._deferred.pop(index).run(self.poll)

    def recompute(
        self, index: int, loss: Loss | None = None, images: Sequence[Tensor] = ()
    ) -> None:
        """Do nothing: forward has kept its graph."""

    @contextmanager
    def watched(self, watch: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
        """Pass nothing: hooks of the modules see their outputs."""
        self.is_watched = True
        try:
            yield
        finally:
            self.is_watched = False

    def part_of(self, index: int) -> Box | None:
        """Return None: a micro-batch gives whole maps."""
        return None

    def still_read(self, index: int) -> set[int]:
        """Return the addresses of the storages of the deferred weight gradients."""
        return set(self.left_bytes(index))

    def left_bytes(self, index: int) -> dict[int, int]:
        """Return the bytes of the storages of the deferred weight gradients by address."""
        deferred = self._deferred.get(index)
        return {} if deferred is None else storage_sizes(deferred.tensors())

    def brought_bytes(self, index: int) -> int:
        """Return `kept_bytes`."""
        return self.kept_bytes(index)

    def kept_bytes(self, index: int) -> int:
        """Return the measured bytes of a forward."""
        return self.stash_bytes or 0

    def held_bytes(self, index: int) -> int:
        """Return the measured bytes of deferred weight gradients."""
        return self._held_bytes.get(self._alike(index), 0)

    @property
    def held_for_weights_bytes(self) -> int | None:
        """Return the measured bytes of deferred weight gradients, if there have been any."""
        return self._held_bytes.get(0)

    def reset(self) -> None:
        """Drop all micro-batches in flight after a failed step."""
        self._stash.clear()
        self._deferred.clear()

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the layers for evaluation, keep nothing, and return the output of the last layer."""
        with torch.no_grad():
            output: Any = tuple(inputs)
            for module in self.modules:
                output = module(*as_tuple(output))
                self.poll()
        return output

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, their gradients, low copies and buffers.

        Gradients are as large as their parameters; frozen parameters have none.
        """
        parameters = list(self.modules.parameters())
        gradients = tensor_bytes(parameter for parameter in parameters if parameter.requires_grad)
        others = [*self.modules.buffers(), *low_copies(self.modules)]
        return tensor_bytes(parameters) + gradients + tensor_bytes(others)

    @property
    def num_in_flight(self) -> int:
        """Return the number of micro-batches whose backward is not complete."""
        return len(self._stash) + len(self._deferred)

    def _prepare(self, inputs: Tensors) -> None:
        """Change the layers before their first forward, whose memory is measured."""

    def _alike(self, index: int) -> int:
        """Return a number that is equal for indices that keep equally many bytes."""
        return 0

    def _known(self, more: Iterable[Tensor]) -> list[Tensor]:
        return [
            *more,
            *self.modules.parameters(),
            *self.modules.buffers(),
            *low_copies(self.modules),
        ]

    def deferring_to(self, deferred: DeferredGradients | None) -> AbstractContextManager[None]:
        """Return a context in which weight gradients are left to `deferred`, if it is given."""
        return nullcontext() if deferred is None else self.split_layers().defer_to(deferred)

    def _backward(
        self, index: int, stash: Stash, gradients: Sequence[Tensor]
    ) -> tuple[Any, Tensors]:
        run_backward(stash.edges, gradients)
        leaves: Tensors = stash.inputs
        input_gradients = tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in leaves
            if leaf.requires_grad
        )
        for leaf in leaves:
            leaf.grad = None  # an input that is read until W must not keep its gradient
        return input_gradients, leaves

    def run_layers(self, leaves: Tensors, loss: Loss | None) -> Tensors:
        """Run the layers, and return their outputs, or the loss of these."""
        output: Any = leaves
        polled_s = time.perf_counter()
        for module in self.modules:
            output = module(*as_tuple(output))
            if time.perf_counter() - polled_s < POLL_EVERY_S:
                continue
            self.poll()
            first = next(tensors_in(output))
            if first.requires_grad:
                first.register_hook(lambda _: self.poll())  # type: ignore[no-untyped-call]
            del first  # or it would outlive the next layer
            polled_s = time.perf_counter()
        return as_tuple(output) if loss is None else (loss(output),)


class CompiledStage(WholeStage):
    """A stage whose layers torch.compile compiles on its first forward; its backward is whole."""

    def __init__(
        self,
        modules: nn.ModuleList,
        is_first: bool,
        poll: Callable[[], None],
        is_drawing: Callable[[nn.Module], bool],
    ) -> None:
        """Take also a function that tells which layers draw random numbers, and stay as they are."""
        super().__init__(modules, is_first, poll)
        self._is_drawing = is_drawing

    def _prepare(self, inputs: Tensors) -> None:
        compile_layers(list(self.modules), inputs, self._is_drawing)


def gradient_edges(outputs: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
    """Return the edges at which gradients of floating-point outputs enter the graph.

    The edge is None for an output that needs no gradient.
    """
    return tuple(
        get_gradient_edge(tensor) if tensor.requires_grad else None
        for tensor in outputs
        if tensor.is_floating_point()
    )


def run_backward(edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """Run the backward of a graph from its edges.

    There may be a gradient for an output that needs none, such as images passed on, and no gradient
    for an output that is unused.
    """
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(edges, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    if pairs:
        run_engine([edge for edge, _ in pairs], [gradient for _, gradient in pairs])

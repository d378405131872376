"""A stage: layers that move together between ranks, and the tensors that their backward needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gems.autograd.compiled import check_compiler, compile_layers
from gems.autograd.mixed import low_copies
from gems.autograd.outputs import as_tuple, tensors_in
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.autograd.storages import StashMeter, new_bytes, storage_addresses, tensor_bytes

Loss = Callable[
    [Any], Tensor
]  # of what the last layer gives: a tensor, or tensors in tuples, lists and dicts
StageKey = tuple[int, int]  # direction, stage
POLL_EVERY_S = (
    0.005  # of a forward, and of its backward: a hook after each layer of 1 ms took 4 % of a step
)


class Stash(NamedTuple):
    """The remains of a forward.

    The graph is kept by its edges, so the memory of outputs is free once they are sent. `inputs`
    are the leaves, or the `SegmentInput` of a segment.
    """

    inputs: Any
    edges: tuple[GradientEdge | None, ...]
    deferred: DeferredGradients | None


class Stage:
    """Runs forward and backward of its layers, for several micro-batches in flight.

    Backward is whole, or split into `backward_input` and `backward_weight` (Qi et al. 2023, section
    2).

    Attributes:
        stash_bytes: The bytes that a forward keeps, without parameters, buffers and inputs;
            measured on the first micro-batch, like the two below.
        held_for_weights_bytes: The bytes that `backward_input` leaves for `backward_weight`,
            without received gradients either.
        input_bytes: The bytes of the inputs.
    """

    def __init__(self, modules: nn.ModuleList, is_first: bool, poll: Callable[[], None]) -> None:
        self.modules = modules
        self.stash_bytes: int | None = None
        self.input_bytes: int | None = None
        self.held_for_weights_bytes: int | None = None
        self.is_first = is_first
        self.poll = poll
        self._stash: dict[int, Stash] = {}
        self._deferred: dict[int, DeferredGradients] = {}
        self._layers: SplitLayers | None = None

    def split_layers(self) -> SplitLayers:
        """Prepare the layers for a split backward once, and return them."""
        if self._layers is None:
            self._layers = SplitLayers(self.modules)
        return self._layers

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run the layers and keep what backward needs.

        Return the tensors of the next boundary, detached. On the last stage, `loss` turns the
        model's output into a scalar, which is returned. If `is_split`, `backward_input` and
        `backward_weight` will follow instead of `backward`.
        """
        has_gradient = not self.is_first
        leaves = tuple(
            tensor.detach().requires_grad_(has_gradient and tensor.is_floating_point())
            for tensor in inputs
        )
        deferred = DeferredGradients() if is_split else None
        with self._deferring_to(deferred):
            if self.stash_bytes is None:
                with StashMeter(self._known(leaves)) as meter:
                    outputs = self._run(leaves, loss)
                self.stash_bytes, self.input_bytes = meter.saved_bytes, tensor_bytes(leaves)
            else:
                outputs = self._run(leaves, loss)
        self._stash[micro_batch] = Stash(leaves, gradient_edges(outputs), deferred)
        return tuple(tensor.detach() for tensor in outputs)

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Add to the parameters' gradients, and free what forward kept.

        Take the gradients of the floating-point outputs. Return the gradients of the floating-point
        inputs, and the inputs themselves, which nothing reads any more.
        """
        return self._backward(micro_batch, self._stash.pop(micro_batch), gradients)

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Compute the input gradients like `backward`; keep only what the weight gradients need.

        Weight gradients of layers that cannot be split are added now. The storages in `still_read`
        must not change until `backward_weight`.

        Raises:
            RuntimeError: A tensor that is needed was changed in place.
        """
        stash = self._stash.pop(micro_batch)
        assert stash.deferred is not None
        with self._deferring_to(stash.deferred):
            found = self._backward(micro_batch, stash, gradients)
        self._deferred[micro_batch] = stash.deferred
        if self.held_for_weights_bytes is None:
            known = storage_addresses(self._known([*found[1], *gradients]))
            self.held_for_weights_bytes = new_bytes(stash.deferred.tensors(), known)
        return found

    def backward_weight(self, micro_batch: int) -> None:
        """Add the weight gradients that `backward_input` deferred, and free what it kept.

        Raises:
            RuntimeError: A tensor that is needed was changed in place after `backward_input`.
        """
        self._deferred.pop(micro_batch).run(self.poll)

    def still_read(self, micro_batch: int) -> set[int]:
        """Return the addresses of the storages that a micro-batch's `backward_weight` will read."""
        return (
            storage_addresses(self._deferred[micro_batch].tensors())
            if micro_batch in self._deferred
            else set()
        )

    def brought_bytes(self, micro_batch: int) -> int:
        """Return by how many bytes forward of a micro-batch changed the kept memory."""
        return self.kept_bytes(micro_batch)

    def kept_bytes(self, micro_batch: int) -> int:
        """Return how many of the kept bytes backward of a micro-batch frees."""
        return self.stash_bytes or 0

    def held_bytes(self, micro_batch: int) -> int:
        """Return the bytes that a micro-batch's `backward_input` left for `backward_weight`."""
        return self.held_for_weights_bytes or 0

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

    def _known(self, more: Iterable[Tensor]) -> list[Tensor]:
        return [
            *more,
            *self.modules.parameters(),
            *self.modules.buffers(),
            *low_copies(self.modules),
        ]

    def _deferring_to(self, deferred: DeferredGradients | None) -> AbstractContextManager[None]:
        return nullcontext() if deferred is None else self.split_layers().defer_to(deferred)

    def _backward(
        self, micro_batch: int, stash: Stash, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        run_backward(stash.edges, gradients)
        leaves: tuple[Tensor, ...] = stash.inputs
        input_gradients = tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in leaves
            if leaf.requires_grad
        )
        for leaf in leaves:
            leaf.grad = None  # an input that is read until W must not keep its gradient
        return input_gradients, leaves

    def _run(self, leaves: tuple[Tensor, ...], loss: Loss | None) -> tuple[Tensor, ...]:
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
            polled_s = time.perf_counter()
        return as_tuple(output) if loss is None else (loss(output),)


class CompiledStage(Stage):
    """A stage whose layers torch.compile compiles on its first forward; its backward is whole."""

    def __init__(
        self,
        modules: nn.ModuleList,
        is_first: bool,
        poll: Callable[[], None],
        device: torch.device,
        is_drawing: Callable[[nn.Module], bool],
    ) -> None:
        """Take also a function that tells which layers draw random numbers, and so stay uncompiled.

        Raises:
            ConfigError: This machine cannot compile for the device.
        """
        super().__init__(modules, is_first, poll)
        check_compiler(device)
        self._is_drawing = is_drawing

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run the layers like `Stage.forward`.

        The first call compiles them, so that the memory that they then keep is measured.
        """
        assert not is_split, "a layer's backward is compiled as a whole"
        if self.stash_bytes is None:
            compile_layers(list(self.modules), inputs, self._is_drawing)
        return super().forward(micro_batch, inputs, loss)


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
        torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])

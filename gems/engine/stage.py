"""A stage: the layers that a rank runs for one direction, and what their backward needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gems.engine.ledger import StashMeter, tensor_bytes
from gems.models.build import as_tuple

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Stash:
    leaves: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]


class Stage:
    """Runs forward and backward of its layers, for several micro-batches in flight.

    Of a forward only what autograd saved stays: the graph is kept by its edge, so the output's memory is free as
    soon as it has been sent.
    """

    def __init__(self, modules: nn.ModuleList, is_first: bool, poll: Callable[[], None]) -> None:
        self.modules = modules
        self.stash_bytes: int | None = None
        self._is_first = is_first
        self._poll = poll
        self._stash: dict[int, _Stash] = {}

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None
    ) -> tuple[Tensor, ...]:
        """Runs the layers and keeps what backward needs.

        Args:
            micro_batch: names the stash.
            inputs: the boundary's tensors, or the images on the first stage.
            loss: on the last stage, what makes a scalar of its one output.

        Returns:
            The next boundary's tensors, detached; with `loss`, the scalar.
        """
        leaves = tuple(
            tensor.detach().requires_grad_(tensor.is_floating_point() and not self._is_first)
            for tensor in inputs
        )
        if self.stash_bytes is None:
            with StashMeter([*leaves, *self.modules.parameters(), *self.modules.buffers()]) as meter:
                outputs = self._run(leaves, loss)
            self.stash_bytes = meter.saved_bytes
        else:
            outputs = self._run(leaves, loss)
        edges = tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor in outputs
            if tensor.is_floating_point()
        )
        self._stash[micro_batch] = _Stash(leaves, edges)
        return tuple(tensor.detach() for tensor in outputs)

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Adds to the parameters' gradients, and frees what forward kept.

        Args:
            micro_batch: as given to `forward`.
            gradients: those of the floating-point outputs, in order.

        Returns:
            The gradients of the floating-point inputs, and the inputs themselves, which nothing reads any more.
        """
        stash = self._stash.pop(micro_batch)
        # a gradient also comes for what needs none: images handed on, or a first stage without parameters
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(stash.edges, gradients, strict=True)
            if edge is not None
        ]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        input_gradients = tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in stash.leaves
            if leaf.requires_grad
        )
        return input_gradients, stash.leaves

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the layers for evaluation: nothing is kept, running statistics are used."""
        with torch.no_grad():
            values = tuple(inputs)
            for module in self.modules:
                values = as_tuple(module(*values))
                self._poll()
        return values

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, of gradients of the same size, and of buffers."""
        parameters = list(self.modules.parameters())
        return 2 * tensor_bytes(parameters) + tensor_bytes(self.modules.buffers())

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose backward is still to come."""
        return len(self._stash)

    def _run(self, leaves: tuple[Tensor, ...], loss: Loss | None) -> tuple[Tensor, ...]:
        values = leaves
        for module in self.modules:
            values = as_tuple(module(*values))
            self._poll()
            if values[0].requires_grad:
                values[0].register_hook(self._poll_in_backward)  # type: ignore[no-untyped-call]
        return values if loss is None else (loss(values[0]),)

    def _poll_in_backward(self, gradient: Tensor) -> None:
        self._poll()

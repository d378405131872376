"""A stage: the layers that a rank runs for one direction, and what their backward needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gems.autograd.memory_counter import StashMeter, new_bytes, storages_of, tensor_bytes
from gems.autograd.split_backward.deferred import Deferred
from gems.autograd.split_backward.layers import SplitLayers
from gems.models.build import as_tuple

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Stash:
    leaves: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]
    later: Deferred | None


class Stage:
    """Runs forward and backward of its layers, for several micro-batches in flight.

    Of a forward only what autograd saved stays: the graph is kept by its edge, so the output's memory is free as
    soon as it has been sent. A backward is whole, or split in two (Qi et al. 2023, section 2): `backward_input` gives
    the input gradient, and `backward_weight` later the rest.

    `stash_bytes` is what a forward keeps and `held_for_weights_bytes` what is left of that, or new, until
    `backward_weight`; both without parameters, buffers, inputs and gradients received. `input_bytes` are the inputs.
    Each is measured on the first micro-batch.
    """

    def __init__(self, modules: nn.ModuleList, is_first: bool, poll: Callable[[], None]) -> None:
        self.modules = modules
        self.stash_bytes: int | None = None
        self.input_bytes: int | None = None
        self.held_for_weights_bytes: int | None = None
        self.is_first = is_first
        self._poll = poll
        self._stash: dict[int, _Stash] = {}
        self._later: dict[int, Deferred] = {}
        self._layers: SplitLayers | None = None

    def split_layers(self) -> SplitLayers:
        """Prepare the layers for a split backward; more calls change nothing."""
        if self._layers is None:
            self._layers = SplitLayers(self.modules)
        return self._layers

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None, is_split: bool = False
    ) -> tuple[Tensor, ...]:
        """Run the layers and keeps what backward needs.

        Args:
            micro_batch: names the stash.
            inputs: the boundary's tensors, or the images on the first stage.
            loss: on the last stage, what makes a scalar of its one output.
            is_split: `backward_input` and `backward_weight` will follow, and not `backward`.

        Returns:
            The next boundary's tensors, detached; with `loss`, the scalar.
        """
        leaves = tuple(
            tensor.detach().requires_grad_(tensor.is_floating_point() and not self.is_first) for tensor in inputs
        )
        later = Deferred() if is_split else None
        with self._leaving_to(later):
            if self.stash_bytes is None:
                with StashMeter(self._known(leaves)) as meter:
                    outputs = self._run(leaves, loss)
                self.stash_bytes, self.input_bytes = meter.saved_bytes, tensor_bytes(leaves)
            else:
                outputs = self._run(leaves, loss)
        self._stash[micro_batch] = _Stash(leaves, edges_of(outputs), later)
        return tuple(tensor.detach() for tensor in outputs)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Add to the parameters' gradients, and frees what forward kept.

        Args:
            micro_batch: as given to `forward`.
            gradients: those of the floating-point outputs, in order.

        Returns:
            The gradients of the floating-point inputs, and the inputs themselves, which nothing reads any more.
        """
        return self._backward(self._stash.pop(micro_batch), gradients)

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Compute the input gradients, and keeps of what forward kept only what the weight gradients need.

        The weight gradients of layers that cannot be split are added now.

        Args:
            micro_batch: as given to `forward`, with `is_split`.
            gradients: those of the floating-point outputs, in order.

        Returns:
            The gradients of the floating-point inputs, and the inputs. Of those and of `gradients` some may be read
            until `backward_weight`: `still_read` tells.

        Raises:
            RuntimeError: a tensor that is needed was changed in place.
        """
        stash = self._stash.pop(micro_batch)
        assert stash.later is not None
        with self._leaving_to(stash.later):
            found = self._backward(stash, gradients)
        self._later[micro_batch] = stash.later
        if self.held_for_weights_bytes is None:
            known = storages_of(self._known([*stash.leaves, *gradients]))
            self.held_for_weights_bytes = new_bytes(stash.later.tensors(), known)
        return found

    def backward_weight(self, micro_batch: int) -> None:
        """Add the weight gradients that `backward_input` left, and frees what it kept.

        Raises:
            RuntimeError: a tensor that is needed was changed in place since `backward_input`.
        """
        self._later.pop(micro_batch).run(self._poll)

    def still_read(self, micro_batch: int) -> set[int]:
        """Return the storages that `backward_weight` of a micro-batch will read, by their addresses."""
        return storages_of(self._later[micro_batch].tensors()) if micro_batch in self._later else set()

    def forget(self) -> None:
        """Drop all micro-batches in flight, after a step that was broken off."""
        self._stash.clear()
        self._later.clear()

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the layers for evaluation: nothing is kept, running statistics are used."""
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
        """Micro-batches whose backward, or the rest of it, is still to come."""
        return len(self._stash) + len(self._later)

    def _known(self, more: Iterable[Tensor]) -> list[Tensor]:
        return [*more, *self.modules.parameters(), *self.modules.buffers()]

    def _leaving_to(self, later: Deferred | None) -> AbstractContextManager[None]:
        return nullcontext() if later is None else self.split_layers().into(later)

    def _backward(self, stash: _Stash, gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        run_backward(stash.edges, gradients)
        input_gradients = tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in stash.leaves if leaf.requires_grad
        )
        for leaf in stash.leaves:
            leaf.grad = None  # an input that is read until W must not keep its gradient
        return input_gradients, stash.leaves

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


def edges_of(outputs: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
    """Return where the gradients of floating-point outputs enter the graph; None where one needs no gradient."""
    return tuple(
        get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs if tensor.is_floating_point()
    )


def run_backward(edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """Run the backward of a graph from its edges.

    A gradient also comes for what needs none (images handed on, a first stage without parameters), and None for an
    output that nothing has used.
    """
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(edges, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])

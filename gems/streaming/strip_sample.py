"""One image through a stage in strips, forward and back.

The graph of autograd is cut at what strips keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gems.autograd.cuts import Cut, begin
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.streaming.operations.operation import STATIC
from gems.streaming.strip_run import Draws, RunMode
from gems.streaming.strip_stage import StripStage
from gems.streaming.trace import Weight

Gradients = Sequence[Tensor | None]


class StripGraph(Protocol):
    """The graph of a strip."""

    @property
    def has_own_memory(self) -> bool:
        """Return whether each tensor that the strip keeps is alone in its memory."""

    def backward(self, outputs: Gradients, kept: Gradients) -> tuple[Gradients, Gradients]:
        """Take the gradients of outputs and of what was kept.

        Returns:
            Those of the inputs, and those of what was carried to the strip.
        """


StripOutputs = tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], StripGraph]


class _EagerGraph(NamedTuple):
    """The ends of a graph: outputs and what is kept, inputs and what was carried."""

    outputs: list[GradientEdge | None]
    kept: list[GradientEdge | None]
    inputs: list[Cut | None]
    carried: list[Cut | None]
    has_own_memory: bool = False

    def backward(self, outputs: Gradients, kept: Gradients) -> tuple[Gradients, Gradients]:
        """Run the backward of autograd; see `StripGraph.backward`."""
        ends = [*zip(self.outputs, outputs, strict=True), *zip(self.kept, kept, strict=True)]
        pairs = [
            (edge, gradient) for edge, gradient in ends if edge is not None and gradient is not None
        ]
        if pairs:
            torch.autograd.backward(
                [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
            )
        return _gradients(self.inputs), _gradients(self.carried)


class StripSample:
    """Forward of strips first to last, then backward last to first, of one micro-batch.

    A strip may be run without a graph, and run again before its backward from its inputs and what
    was carried to it.
    """

    def __init__(
        self, stage: StripStage, draws: Draws | None = None, has_input_gradients: bool = True
    ) -> None:
        self._stage = stage
        self._draws = draws
        self._has_gradients = has_input_gradients
        # by the strip that takes them, in the order in which it does
        self._carries: dict[int, list[Tensor]] = {}
        self._graphs: list[StripGraph | None] = []
        # buffers that the first strip changes, with their values before
        self._buffers: dict[Weight, Tensor] = {}
        # gradients of what a strip has kept, by the strip and the place there
        self._given: dict[tuple[int, int], Tensor | None] = {}

    @property
    def carried(self) -> tuple[Tensor, ...]:
        """What earlier strips have kept for the next.

        In memory of its own, unless weights alone determine it.
        """
        return tuple(self._carries.get(len(self._graphs), ()))

    @property
    def left(self) -> list[Tensor]:
        """What strips have kept for all later ones."""
        return [tensor for tensors in self._carries.values() for tensor in tensors]

    @property
    def static(self) -> list[Tensor]:
        """What of `carried` weights alone determine, the same in all strips of an image."""
        strip = len(self._graphs)
        places = self._stage.static_carries(strip)
        return [self.carried[place] for place in places] if self._carries else []

    def forward(
        self,
        inputs: Sequence[Tensor | None],
        deferred: DeferredGradients | None = None,
        *,
        is_run_again: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Run the next strip; return what it gives, detached.

        If it `is_run_again`, its graph is dropped.
        """
        strip = len(self._graphs)
        if is_run_again and not strip:
            self._buffers = self._stage.changed_buffers()
        carried = self.carried
        outputs, carries, graph = self.run(strip, inputs, carried, deferred, is_again=False)
        self._carries.pop(strip, None)
        self._graphs.append(None if is_run_again else graph)
        passed_on = set[int]()
        for carry, tensor in zip(self._stage.held(strip), carries, strict=True):
            memory = tensor.untyped_storage()._cdata
            is_own = carry.kind == STATIC or (
                (graph.has_own_memory or _is_among(tensor, carried)) and memory not in passed_on
            )
            passed_on.add(memory)
            own = tensor.detach() if is_own else tensor.detach().clone()
            self._carries.setdefault(carry.to, []).append(own.requires_grad_(tensor.requires_grad))
        return tuple(None if tensor is None else tensor.detach() for tensor in outputs)

    def run_again(
        self,
        strip: int,
        inputs: Sequence[Tensor | None],
        carried: Sequence[Tensor],
        deferred: DeferredGradients | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Run a strip again before its backward, from its inputs and what was `carried` to it.

        Return what it gives, detached.
        """
        outputs, _, self._graphs[strip] = self.run(strip, inputs, carried, deferred, is_again=True)
        return tuple(None if tensor is None else tensor.detach() for tensor in outputs)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run backward of the last strip that is left.

        Takes the gradients of its outputs, and returns those of its inputs: None where nothing has
        come.
        """
        self._carries.clear()
        graph = self._graphs.pop()
        assert graph is not None
        strip = len(self._graphs)
        carry_grads = [
            self._given.pop((strip, place), None) for place in range(len(self._stage.held(strip)))
        ]
        input_grads, carried_grads = graph.backward(gradients, carry_grads)
        received = {tensor.untyped_storage()._cdata for tensor in gradients if tensor is not None}
        for key, carried_grad in zip(self._stage.given(strip), carried_grads, strict=True):
            gradient = _apart(carried_grad, received)
            # one that waits is not to hold more memory than its own
            if gradient is not None and key[0] < strip - 1:
                gradient = gradient.clone()
            self._given[key] = gradient
        return tuple(input_grads)

    def run(
        self,
        strip: int,
        inputs: Sequence[Tensor | None],
        carried: Sequence[Tensor],
        deferred: DeferredGradients | None,
        *,
        is_again: bool,
    ) -> StripOutputs:
        """Run a strip; return what it gives, what it keeps, and its graph."""
        is_cut = [
            self._has_gradients and tensor is not None and tensor.is_floating_point()
            for tensor in inputs
        ]
        here = [Cut() if flag else None for flag in is_cut]
        before = [Cut() if tensor.requires_grad else None for tensor in carried]
        outputs, carries = self._stage.forward(
            strip,
            _begun(here, inputs),
            _begun(before, carried),
            RunMode(self._draws, deferred, is_again, self._buffers if is_again else None),
        )
        return (
            outputs,
            carries,
            _EagerGraph([*map(_edge, outputs)], [*map(_edge, carries)], here, before),
        )


def _begun(cuts: Iterable[Cut | None], tensors: Sequence[Any]) -> list[Any]:
    return [
        tensor if cut is None or tensor is None else begin(cut, tensor)
        for cut, tensor in zip(cuts, tensors, strict=True)
    ]


def _gradients(cuts: Sequence[Cut | None]) -> Gradients:
    return [None if cut is None else cut.gradient for cut in cuts]


def _is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether a tensor is one that was carried before, whole."""
    memory = tensor.untyped_storage()
    is_whole = tensor.numel() * tensor.element_size() == memory.nbytes()
    return is_whole and any(other.untyped_storage()._cdata == memory._cdata for other in others)


def _apart(gradient: Tensor | None, received: set[int]) -> Tensor | None:
    """Return a gradient in memory of its own.

    That of a message is written again before the next backward.
    """
    is_shared = gradient is not None and gradient.untyped_storage()._cdata in received
    return gradient.clone() if gradient is not None and is_shared else gradient


def _edge(tensor: Tensor | None) -> GradientEdge | None:
    return None if tensor is None or not tensor.requires_grad else get_gradient_edge(tensor)

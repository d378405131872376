"""One image through a stage in strips, forward and back: the graph of autograd is cut at what strips keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.strips.run import Draws
from gems.autograd.strips.stage import StripStage

_Edges = list[GradientEdge | None]


@dataclass(slots=True)
class Cut:
    """A place where the graph begins: the gradient that arrives there, and no tensor, which would be held."""

    gradient: Tensor | None = None


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.cut = cut
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.cut.gradient = gradient
        return None, None, None


_apply: Callable[..., Tensor] = _Begin.apply


def begin(cut: Cut, tensor: Tensor) -> Tensor:
    """Return a tensor at which a graph begins, whose gradient goes to `cut`."""
    return _apply(cut, torch.empty(0, requires_grad=True), tensor)


class StripSample:
    """Forward of strips first to last, then backward last to first, of one micro-batch."""

    def __init__(self, stage: StripStage, draws: Draws | None = None, has_input_gradients: bool = True) -> None:
        self._stage, self._draws, self._has_gradients = stage, draws, has_input_gradients
        self._carries: tuple[Tensor, ...] = ()
        self._edges: list[tuple[_Edges, _Edges]] = []
        self._cuts: list[tuple[list[Cut | None], list[Cut | None]]] = []
        self._given: list[Tensor | None] = []  # gradients of what a strip has kept, from the strip behind it

    @property
    def carried(self) -> tuple[Tensor, ...]:
        """What the last strip has kept for the next."""
        return self._carries

    def forward(
        self, inputs: Sequence[Tensor | None], deferred: DeferredGradients | None = None
    ) -> tuple[Tensor | None, ...]:
        """Run the next strip; return what it gives, detached."""
        is_cut = [self._has_gradients and tensor is not None and tensor.is_floating_point() for tensor in inputs]
        here = [Cut() if each else None for each in is_cut]
        kept_cuts = [Cut() if tensor.requires_grad else None for tensor in self._carries]
        given = [tensor if cut is None or tensor is None else begin(cut, tensor)
                 for cut, tensor in zip(here, inputs, strict=True)]  # fmt: skip
        carried = [tensor if cut is None else begin(cut, tensor)
                   for cut, tensor in zip(kept_cuts, self._carries, strict=True)]  # fmt: skip
        outputs, kept = self._stage.forward(len(self._cuts), given, carried, self._draws, deferred)
        self._edges.append(([_edge(tensor) for tensor in outputs], [_edge(tensor) for tensor in kept]))
        self._cuts.append((here, kept_cuts))
        self._carries = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in kept)
        return tuple(None if tensor is None else tensor.detach() for tensor in outputs)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run backward of the last strip that is left.

        Takes the gradients of its outputs, and returns those of its inputs: None where nothing has come.
        """
        self._carries = ()
        outputs, kept = self._edges.pop()
        here, carried = self._cuts.pop()
        ends = [*zip(outputs, gradients, strict=True), *zip(kept, self._given or [None] * len(kept), strict=True)]
        pairs = [(edge, gradient) for edge, gradient in ends if edge is not None and gradient is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        self._given = [None if cut is None else cut.gradient for cut in carried]
        return tuple(None if cut is None else cut.gradient for cut in here)


def _edge(tensor: Tensor | None) -> GradientEdge | None:
    return None if tensor is None or not tensor.requires_grad else get_gradient_edge(tensor)

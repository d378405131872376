"""The loss of an image in strips: after the last strip, or of each strip with that strip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gems.autograd.cuts import Cut, begin
from gems.autograd.outputs import as_tuple
from gems.engine.stage import Loss
from gems.engine.stages.whole import gradient_edges, run_backward
from gems.streaming.strip_stage import StripStage

Outputs = tuple[Tensor | None, ...]  # of a strip
Gradients = list[Tensor | None]


class ImageLoss(Protocol):
    """The loss of one image on the last stage.

    Attributes:
        waits: Whether the outputs of strips are kept for the loss.
    """

    waits: bool

    def forward(self, strip: int, outputs: Outputs, loss: Loss, is_run_again: bool) -> None:
        """Take the outputs of a strip, and keep what the backward of a loss needs.

        If the strip `is_run_again`, a loss of its own keeps nothing.
        """

    def run_again(self, strip: int, outputs: Outputs, loss: Loss) -> None:
        """Take the outputs of a strip that has run again."""

    def backward(self, strip: int, gradients: Sequence[Tensor]) -> Gradients:
        """Return the gradients of the outputs of a strip, given that of the loss."""


class LossAtEnd(ImageLoss):
    """Keeps the outputs of all strips until the loss of the whole image follows the last one."""

    def __init__(self, form: StripStage) -> None:
        self._form = form
        self._outputs: list[Outputs] = []
        self._cuts: list[list[Cut | None]] = []  # by strip: where the gradients of outputs arrive
        self._edges: tuple[GradientEdge | None, ...] = ()

    @property
    def waits(self) -> bool:  # type: ignore[override]
        """Return whether the loss is still to come."""
        return bool(self._outputs)

    def forward(self, strip: int, outputs: Outputs, loss: Loss, is_run_again: bool) -> None:
        """Keep the outputs; with those of the last strip, compute the loss."""
        self._outputs.append(outputs)
        if strip < self._form.strips - 1:
            return
        self._cuts = [_cuts(outputs) for outputs in self._outputs]
        strips = [
            _begun(cuts, outputs) for cuts, outputs in zip(self._cuts, self._outputs, strict=True)
        ]
        self._outputs = []
        whole = self._form.joined(strips)
        del strips
        self._edges = gradient_edges(as_tuple(loss(whole)))

    def run_again(self, strip: int, outputs: Outputs, loss: Loss) -> None:
        """Do nothing: the loss has kept what its backward needs."""

    def backward(self, strip: int, gradients: Sequence[Tensor]) -> Gradients:
        """Run the backward of the loss before that of the last strip."""
        if self._edges:
            run_backward(self._edges, gradients)
            self._edges = ()
            for cut in (inner for cuts in self._cuts for inner in cuts if inner is not None):
                # a part of the gradient of all strips, which each part would keep alive
                if cut.gradient is not None:
                    cut.gradient = cut.gradient.clone()
        return _gradients(self._cuts.pop())


class LossOfStrips(ImageLoss):
    """Computes the loss of each strip that has outputs, and its backward with that of the strip."""

    waits = False

    def __init__(self, form: StripStage, has_loss: Callable[[int], bool]) -> None:
        self._form = form
        self._has_loss = has_loss
        self._losses: dict[int, tuple[list[Cut | None], tuple[GradientEdge | None, ...]]] = {}

    def forward(self, strip: int, outputs: Outputs, loss: Loss, is_run_again: bool) -> None:
        """Compute the loss of a strip."""
        if not self._has_loss(strip):
            return
        if is_run_again:
            whole: Any = outputs
            with torch.no_grad():
                loss(self._form.structured(whole))
        else:
            self.run_again(strip, outputs, loss)

    def run_again(self, strip: int, outputs: Outputs, loss: Loss) -> None:
        """Compute the loss of a strip with its graph."""
        if not self._has_loss(strip):
            return
        cuts = _cuts(outputs)
        begun: Any = _begun(cuts, outputs)
        value = loss(self._form.structured(begun))
        self._losses[strip] = cuts, gradient_edges(as_tuple(value))

    def backward(self, strip: int, gradients: Sequence[Tensor]) -> Gradients:
        """Run the backward of the loss of a strip."""
        if strip not in self._losses:
            return [None] * len(self._form.outputs)
        cuts, edges = self._losses.pop(strip)
        run_backward(edges, gradients)
        return _gradients(cuts)


def _cuts(outputs: Outputs) -> list[Cut | None]:
    return [
        Cut() if tensor is not None and tensor.is_floating_point() else None for tensor in outputs
    ]


def _begun(cuts: Sequence[Cut | None], outputs: Outputs) -> list[Tensor | None]:
    return [
        tensor if cut is None or tensor is None else begin(cut, tensor)
        for cut, tensor in zip(cuts, outputs, strict=True)
    ]


def _gradients(cuts: Sequence[Cut | None]) -> Gradients:
    return [None if cut is None else cut.gradient for cut in cuts]

"""The inputs of a segment, where a graph of autograd begins without holding them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # second: strides


def _gradient_layout(tensor: Tensor) -> Layout:
    """Return the layout in which autograd keeps the gradient of a leaf."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    stride = tensor.stride() if is_dense else torch.empty(tensor.size(), device="meta").stride()
    return tensor.size(), stride, tensor.dtype, tensor.device


def _in_layout(gradient: Tensor | None, layout: Layout) -> Tensor:
    """Return a gradient in a layout, or zeros if the gradient is None."""
    size, stride, dtype, device = layout
    if gradient is not None:
        same = zip(gradient.size(), gradient.stride(), stride, strict=True)
        if all(mine == its or count == 1 for count, mine, its in same):
            return gradient
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return made.zero_() if gradient is None else made.copy_(gradient)


@dataclass(slots=True)
class SegmentInput:
    """The inputs of one forward, and the gradients that backward has computed for wanted inputs.

    A graph holds a leaf that requires a gradient until backward, saved or not. So the graph begins
    at an anchor of one element instead, and the inputs bypass it.
    """

    wanted: tuple[bool, ...]
    layouts: tuple[Layout | None, ...]
    _caught: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def enter(
        cls, inputs: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[SegmentInput, tuple[Tensor, ...]]:
        """Pass inputs into a new graph; those in `wanted` get a gradient.

        Returns:
            The segment's input, and the tensors for its layers, which share the memory of the
                inputs and are no leaves.
        """
        layouts = tuple(
            _gradient_layout(tensor) if tensor.is_floating_point() else None for tensor in inputs
        )
        made = cls(tuple(wanted), layouts)
        values = [tensor.detach() for tensor in inputs]
        indices = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        if indices:
            passed = _pass(
                _anchor(inputs[0].device), made._caught, *(values[index] for index in indices)
            )
            for index, value in zip(indices, passed, strict=True):
                values[index] = value
        return made, tuple(values)

    def gradients(self, is_first: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of the floating-point inputs, and drop them.

        The gradients of a stage's first segment are complete and have the layout of their inputs.
        In later segments, an input without a gradient gives None to the segment before it, as in an
        uncut graph.
        """
        caught = iter(self._caught or [None] * sum(self.wanted))
        found: list[Tensor | None] = []
        for is_wanted, layout in zip(self.wanted, self.layouts, strict=True):
            gradient = next(caught) if is_wanted else None
            if layout is not None and (is_wanted or not is_first):
                found.append(_in_layout(gradient, layout) if is_first else gradient)
        self._caught.clear()
        return tuple(found)


class _Pass(Function):
    """Pass tensors through and catch their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, caught: list[Tensor | None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        # a detached tensor is separate, so the layers may change it in place
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.caught[:] = gradients
        return (None, None, *(None for _ in gradients))


_pass: Callable[..., tuple[Tensor, ...]] = _Pass.apply


@functools.cache
def _anchor(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device, requires_grad=True)  # never gets a gradient

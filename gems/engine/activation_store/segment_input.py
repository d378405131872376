"""The inputs of a segment: they enter its graph without being held by it, and their gradients come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of an input, which its gradient is to have."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_dense: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> _Layout:
        is_dense = bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, is_dense)

    def apply(self, gradient: Tensor | None) -> Tensor:
        """Return the gradient in the layout in which autograd keeps that of a leaf; zeros for None."""
        if gradient is not None and self._fits(gradient):
            return gradient
        made = (
            torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
            if self.is_dense
            else torch.empty(self.size, dtype=self.dtype, device=self.device)
        )
        return made.zero_() if gradient is None else made.copy_(gradient)

    def _fits(self, gradient: Tensor) -> bool:
        if not self.is_dense:
            return gradient.is_contiguous()
        same = zip(gradient.size(), gradient.stride(), self.stride, strict=True)
        return all(mine == its or size == 1 for size, mine, its in same)


@dataclass(slots=True)
class SegmentInput:
    """The inputs of one forward, and the gradients that backward has computed for those that want one.

    A graph holds a leaf that requires a gradient until backward, saved or not. So the graph begins at an anchor of one
    element instead, and the inputs pass by it.
    """

    wanted: tuple[bool, ...]
    layouts: tuple[_Layout | None, ...]
    _caught: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def enter(
        cls, inputs: Sequence[Tensor], wanted: Sequence[bool], anchor: Tensor
    ) -> tuple[SegmentInput, tuple[Tensor, ...]]:
        """Pass inputs into a new graph.

        Args:
            inputs: of any number and shape.
            wanted: which of them want a gradient.
            anchor: one element that requires a gradient, and gets none.

        Returns:
            The segment's input, and the tensors for its layers: over the same memory, and no leaves.
        """
        layouts = tuple(_Layout.from_tensor(tensor) if tensor.is_floating_point() else None for tensor in inputs)
        made = cls(tuple(wanted), layouts)
        values = [tensor.detach() for tensor in inputs]
        indices = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        if indices:
            passed = _pass(anchor, made._caught, *(values[index] for index in indices))
            for index, value in zip(indices, passed, strict=True):
                values[index] = value
        return made, tuple(values)

    def gradients(self, is_first: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of the floating-point inputs, and drop them.

        Those of a stage's first segment are complete and have the layout of their inputs. In later segments an input
        without a gradient gives None to the segment before it, as in an uncut graph.
        """
        caught = iter(self._caught or [None] * sum(self.wanted))
        found: list[Tensor | None] = []
        for is_wanted, layout in zip(self.wanted, self.layouts, strict=True):
            gradient = next(caught) if is_wanted else None
            if layout is not None and (is_wanted or not is_first):
                found.append(layout.apply(gradient) if is_first else gradient)
        self._caught.clear()
        return tuple(found)


class _Pass(Function):
    """Pass tensors through, and catch their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, caught: list[Tensor | None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        # detached, each is a tensor of its own that the layers may change in place
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.caught[:] = gradients
        return (None, None, *(None for _ in gradients))


_pass: Callable[..., tuple[Tensor, ...]] = _Pass.apply

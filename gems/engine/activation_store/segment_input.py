"""The entrance of a segment: inputs get into its graph without staying in it, and their gradients come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, slots=True)
class _Like:
    """The form of an input, for its gradient."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_dense: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        is_dense = bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, is_dense)

    def laid_out(self, gradient: Tensor | None) -> Tensor:
        """Return the gradient in the layout in which autograd keeps that of a leaf; zeros where there is none."""
        if gradient is not None and self._suits(gradient):
            return gradient
        made = (
            torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
            if self.is_dense
            else torch.empty(self.size, dtype=self.dtype, device=self.device)
        )
        return made.zero_() if gradient is None else made.copy_(gradient)

    def _suits(self, gradient: Tensor) -> bool:
        if not self.is_dense:
            return gradient.is_contiguous()
        same = zip(gradient.size(), gradient.stride(), self.stride, strict=True)
        return all(mine == its or size == 1 for size, mine, its in same)


@dataclass(slots=True)
class Entrance:
    """What becomes of the inputs of one run: the gradients that backward has brought, of those that want one.

    A leaf that requires a gradient is held by the graph until backward, saved or not. So the graph begins at one
    element instead, and the inputs pass by it.
    """

    wanted: tuple[bool, ...]
    likes: tuple[_Like | None, ...]
    _caught: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def enter(
        cls, inputs: Sequence[Tensor], wanted: Sequence[bool], anchor: Tensor
    ) -> tuple[Entrance, tuple[Tensor, ...]]:
        """Open the entrance.

        Args:
            inputs: of any number and form.
            wanted: which of them want a gradient.
            anchor: one element that requires a gradient, and gets none.

        Returns:
            The entrance, and the inputs as the segment's layers take them: in the same memory, not leaves.
        """
        likes = tuple(_Like.of(tensor) if tensor.is_floating_point() else None for tensor in inputs)
        entrance = cls(tuple(wanted), likes)
        values = [tensor.detach() for tensor in inputs]
        places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
        if places:
            passed = _pass(anchor, entrance._caught, *(values[place] for place in places))
            for place, value in zip(places, passed, strict=True):
                values[place] = value
        return entrance, tuple(values)

    def gradients(self, is_whole: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of the floating-point inputs, and lets them go.

        `is_whole` is for those that leave the stage: none is missing, and they are laid out as their inputs are.
        Inside of a stage what has no gradient gives none to the segment before, as in an uncut graph.
        """
        caught = iter(self._caught or [None] * sum(self.wanted))
        found: list[Tensor | None] = []
        for is_wanted, like in zip(self.wanted, self.likes, strict=True):
            gradient = next(caught) if is_wanted else None
            if like is not None and (is_wanted or not is_whole):
                found.append(like.laid_out(gradient) if is_whole else gradient)
        self._caught.clear()
        return tuple(found)


class _Pass(Function):
    """Hands tensors on, and catches their gradients."""

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

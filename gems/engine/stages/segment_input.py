"""The inputs of a graph that begins in the middle of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gems.autograd.cuts import Cut, begin

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # second: strides


def _gradient_layout(tensor: Tensor) -> Layout:
    """Return the layout in which autograd keeps the gradient of a leaf."""
    is_dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    stride = tensor.stride() if is_dense else torch.empty(tensor.size(), device="meta").stride()
    return tensor.size(), stride, tensor.dtype, tensor.device


def _in_layout(gradient: Tensor | None, layout: Layout) -> Tensor:
    """Return a gradient in a layout, or zeros if the gradient is None."""
    size, stride, dtype, device = layout
    if gradient is not None:
        same = zip(gradient.size(), gradient.stride(), stride, strict=True)
        if all(own == its or count == 1 for count, own, its in same):
            return gradient
    copy = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return copy.zero_() if gradient is None else copy.copy_(gradient)


@dataclass(frozen=True, slots=True)
class SegmentInput:
    """The inputs of one forward, where its graph begins; those without a cut want no gradient."""

    cuts: tuple[Cut | None, ...]
    layouts: tuple[Layout | None, ...]

    @classmethod
    def enter(
        cls, inputs: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[SegmentInput, tuple[Tensor, ...]]:
        """Pass inputs into a new graph; those in `wanted` get a gradient.

        Returns:
            The segment's input, and the tensors for its layers, which share the memory of the
                inputs and are no leaves.
        """
        layouts = [
            _gradient_layout(tensor) if tensor.is_floating_point() else None for tensor in inputs
        ]
        cuts = [Cut() if is_wanted else None for is_wanted in wanted]
        values = [
            tensor.detach() if cut is None else begin(cut, tensor)
            for cut, tensor in zip(cuts, inputs, strict=True)
        ]
        return cls(tuple(cuts), tuple(layouts)), tuple(values)

    def gradients(self, is_first: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of the floating-point inputs, and drop them.

        The gradients of a stage's first segment are complete and have the layout of their inputs.
        In later segments, an input without a gradient gives None to the segment before it, as in an
        uncut graph.
        """
        gradients: list[Tensor | None] = []
        for cut, layout in zip(self.cuts, self.layouts, strict=True):
            if layout is not None and (cut is not None or not is_first):
                gradient = None
                if cut is not None:
                    gradient, cut.gradient = cut.gradient, None
                gradients.append(_in_layout(gradient, layout) if is_first else gradient)
        return tuple(gradients)

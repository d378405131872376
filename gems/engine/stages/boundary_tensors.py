"""The tensors that pass between two stages with each strip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gems.models.build import TensorSpec
from gems.streaming.strip_stage import Boundary


@dataclass(frozen=True, slots=True)
class BoundaryTensors:
    """What a stage gives the next.

    Tensors with rows in each strip that has any, and others in the last strip.
    """

    boundaries: tuple[Boundary, ...]
    num_strips: int

    def is_there(self, place: int, strip: int) -> bool:
        """Return whether there is anything of a tensor in a strip."""
        if self.boundaries[place].ends is None:
            return strip == self.num_strips - 1
        return self.boundaries[place].is_there(strip)

    def places(self, strip: int, have_gradient: bool = False) -> list[int]:
        """Return which tensors there are in a strip.

        If they are to `have_gradient`, those of a floating-point type.
        """
        return [
            place
            for place, boundary in enumerate(self.boundaries)
            if self.is_there(place, strip)
            and (boundary.dtype.is_floating_point or not have_gradient)
        ]

    def spread(
        self, tensors: Sequence[Tensor], strip: int, have_gradient: bool = False
    ) -> list[Tensor | None]:
        """Return the tensors of a strip at their places, and None at those of the others."""
        spread: list[Tensor | None] = [None] * len(self.boundaries)
        for place, tensor in zip(self.places(strip, have_gradient), tensors, strict=True):
            spread[place] = tensor
        return spread

    def given(
        self, tensors: Sequence[Tensor], strip: int, device: torch.device
    ) -> list[Tensor | None]:
        """Return a strip's tensors like `spread`, with empty tensors for those without rows yet."""
        spread = self.spread(tensors, strip)
        for place, boundary in enumerate(self.boundaries):
            if spread[place] is None and boundary.ends is not None:
                spread[place] = torch.empty(
                    boundary.strip_shape(strip), dtype=boundary.dtype, device=device
                )
        return spread

    def rows_of(self, images: Tensor, strip: int) -> Tensor:
        """Return the first tensor in a strip, of the whole or of nothing but that strip."""
        boundary = self.boundaries[0]
        is_strip = tuple(images.shape) == boundary.strip_shape(strip)
        return images if is_strip else boundary.cut(images, strip)

    def specs(self, strip: int) -> tuple[TensorSpec, ...]:
        """Return shape and type of the tensors of a strip."""
        named = [(str(place), self.boundaries[place]) for place in self.places(strip)]
        return tuple(
            TensorSpec(name, boundary.strip_shape(strip), boundary.dtype)
            for name, boundary in named
        )

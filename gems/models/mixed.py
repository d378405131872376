"""The types of a run's precision, and layers that compute in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from gems.autograd.mixed import Elsewhere, Mixed
from gems.config.training import PRECISIONS


class Precision(NamedTuple):
    """The type of parameters, and the type of computation and of the tensors between layers."""

    parameters: torch.dtype
    compute: torch.dtype

    @classmethod
    def of(cls, name: str) -> Precision:
        """Return the precision for a value of train.precision, or for the name of a torch dtype."""
        return cls(*(getattr(torch, word) for word in PRECISIONS.get(name, (name, name))))

    @property
    def is_mixed(self) -> bool:
        """Whether layers compute in another type than the type of their parameters."""
        return self.parameters is not self.compute


def compute_in(
    layer: nn.Module, precision: Precision, elsewhere: Elsewhere | None = None
) -> nn.Module:
    """Make a layer compute in the low type of a mixed precision, and return the layer.

    `elsewhere` is the device whose autocast applies, if it is not the device of the tensors.
    """
    if precision.is_mixed:
        Mixed(layer, precision.compute, elsewhere)
    return layer

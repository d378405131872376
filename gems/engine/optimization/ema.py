"""The moving average of the weights, which evaluation uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gems.autograd.torch_internals import lerp_all


class WeightAverage:
    """The exponential moving average of a rank's trained parameters.

    Decay x average + (1 - decay) x parameter.
    It begins with the weights before the first step. Copies of a stage have equal weights, so their
    averages stay equal without messages. Parameters of 16 bits are averaged in float32, for the
    steps are smaller than their spacing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        self._decay = decay
        self._values: list[Tensor] = []

    def values(self) -> list[Tensor]:
        """Return the averages in the order of the parameters; the first call copies the weights."""
        if not self._values:
            wide = (
                torch.promote_types(parameter.dtype, torch.float32) for parameter in self.parameters
            )
            self._values = [
                p.detach().to(dtype, copy=True)
                for p, dtype in zip(self.parameters, wide, strict=True)
            ]
        return self._values

    def by_parameter(self) -> dict[nn.Parameter, Tensor]:
        """Return the average of each parameter."""
        return dict(zip(self.parameters, self.values(), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights of now."""
        now = [
            p.detach().to(mean.dtype)
            for p, mean in zip(self.parameters, self.values(), strict=True)
        ]
        if now:
            lerp_all(self._values, now, 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages in place of the weights inside the block.

        Nothing is copied unless the types differ.
        """
        weights = [parameter.data for parameter in self.parameters]
        for parameter, mean in zip(self.parameters, self.values(), strict=True):
            parameter.data = mean.to(parameter.dtype)
        try:
            yield
        finally:
            for parameter, data in zip(self.parameters, weights, strict=True):
                parameter.data = data

    @property
    def num_bytes(self) -> int:
        """Size of the averages in bytes."""
        return sum(mean.nbytes for mean in self.values())

"""A backbone: the named convolutional layers of a network at its published width, before the classifier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gems.models.layer import Layer
from gems.models.steps import Step, chain_layer, channels_after, normed_side, scaled, stride_after


@dataclass(frozen=True, slots=True)
class Part:
    """One layer: its name, its kind for tables, and what it does."""

    name: str
    kind: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Backbone:
    """The parts first to last, with the channels of the publication, whose first convolution has `width`."""

    width: int
    parts: tuple[Part, ...]

    @property
    def stride_px(self) -> int:
        """How many source pixels a side one pixel of the last map stands for."""
        return stride_after(self._steps())

    def normed_px(self, side_px: int) -> int:
        """Return a side of the last map that a norm sees, for a side of the image; 0 when that is too small."""
        return normed_side(side_px, self._steps())

    def channels(self, width: int) -> int:
        """Return the channels of the last map when the first convolution has `width`."""
        return channels_after(0, scaled(tuple(self._steps()), width, self.width))

    def layers(self, in_channels: int, width: int, norm: str) -> list[Layer]:
        """Return a layer for each part, with channels in proportion to `width`."""
        out = []
        for part in self.parts:
            steps = scaled(part.steps, width, self.width)
            out.append(chain_layer(part.name, part.kind, in_channels, steps, norm))
            in_channels = channels_after(in_channels, steps)
        return out

    def _steps(self) -> Iterator[Step]:
        return (step for part in self.parts for step in part.steps)


def carrying(layer: Layer, names: tuple[str, ...]) -> Layer:
    """Return a part's layer that takes and hands on, beside its map, the tensors of these names."""
    return replace(layer, options=tuple((dict(layer.options) | {"carried": names}).items()))

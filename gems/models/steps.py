"""What a convolutional layer does, step by step, as plain data: convolve, pool, normalise, fork into branches.

A layer of the chain families (AlexNet, VGG, inception, ...) is a tuple of steps, which `blocks.chain.Chain` runs. The
same tuple gives the size of its feature map, so that no size stands anywhere twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gems.models.layer import Layer

_CHAIN = "gems.models.blocks.chain:Chain"


class Conv(NamedTuple):
    """A convolution, then the configured norm, then ReLU; sizes are (height, width) in pixels of its input."""

    channels: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int]


class Pool(NamedTuple):
    """A pooling; `how` is "max" or "average" (which counts the padded zeros)."""

    how: str
    kernel: int
    stride: int
    padding: int


class LocalNorm(NamedTuple):
    """Local response normalisation over `channels` neighbouring channels (Krizhevsky et al. 2012, section 3.3)."""

    channels: int


class Fork(NamedTuple):
    """Branches that all read the same input; their outputs are joined along the channels."""

    branches: tuple[tuple[Step, ...], ...]


Step = Conv | Pool | LocalNorm | Fork


def conv(channels: int, kernel: int | tuple[int, int] = 1, stride: int = 1, is_padded: bool = True) -> Conv:
    """Return a convolution; padded, it has ceil(side / stride) pixels a side for an odd kernel."""
    sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (sizes[0] // 2, sizes[1] // 2) if is_padded else (0, 0)
    return Conv(channels, sizes, stride, padding)


def max_pool(kernel: int = 3, stride: int = 2, padding: int = 0) -> Pool:
    """Return a max pooling."""
    return Pool("max", kernel, stride, padding)


def average_pool(kernel: int = 3, stride: int = 1, padding: int = 1) -> Pool:
    """Return an average pooling; without arguments one that keeps the size."""
    return Pool("average", kernel, stride, padding)


def fork(*branches: tuple[Step, ...]) -> Fork:
    """Return branches over one input."""
    return Fork(branches)


def chain_layer(
    name: str, kind: str, in_channels: int, steps: tuple[Step, ...], norm: str, carried: tuple[str, ...] = ()
) -> Layer:
    """Return the layer that runs `steps`, and hands on, beside its output, the tensors named in `carried`."""
    options = (("in_channels", in_channels), ("steps", steps), ("norm", norm), ("carried", carried))
    return Layer(name, kind, _CHAIN, options)


def is_chain(layer: Layer) -> bool:
    """Whether a layer is one that runs steps, which its options name."""
    return layer.target == _CHAIN


def channels_after(in_channels: int, steps: Sequence[Step]) -> int:
    """Return the channels of the feature map after `steps`."""
    for step in steps:
        if isinstance(step, Conv):
            in_channels = step.channels
        elif isinstance(step, Fork):
            in_channels = sum(channels_after(in_channels, branch) for branch in step.branches)
    return in_channels


def side_after(side_px: int, steps: Iterable[Step]) -> int:
    """Return the height of the feature map after `steps`, 0 when a window does not fit; so too for the width.

    Kernels that are no squares are padded, so that either side sees the same.
    """
    for step in steps:
        if isinstance(step, Fork):
            side_px = side_after(side_px, step.branches[0])
        elif isinstance(step, Conv):
            side_px = _windows(side_px, step.kernel[0], step.stride, step.padding[0])
        elif isinstance(step, Pool):
            side_px = _windows(side_px, step.kernel, step.stride, step.padding)
    return side_px


def normed_side(side_px: int, steps: Iterable[Step]) -> int:
    """Return a side of the last map that a convolution makes, and its norm sees; 0 when the image is too small."""
    normed_px = side_px
    for step in steps:
        side_px = side_after(side_px, (step,))
        if isinstance(step, (Conv, Fork)):
            normed_px = side_px
    return normed_px if side_px else 0


def stride_after(steps: Iterable[Step]) -> int:
    """Return how many source pixels a side one pixel after `steps` stands for."""
    stride = 1
    for step in steps:
        if isinstance(step, Fork):
            stride *= stride_after(step.branches[0])
        elif isinstance(step, (Conv, Pool)):
            stride *= step.stride
    return stride


def scaled(steps: tuple[Step, ...], width: int, published: int) -> tuple[Step, ...]:
    """Return the steps with width / published times the channels, rounded down, at least one."""
    return tuple(_scaled(step, width, published) for step in steps)


def scaled_channels(channels: int, width: int, published: int) -> int:
    """Return width / published times the channels, rounded down, at least one."""
    return max(1, channels * width // published)


def _scaled(step: Step, width: int, published: int) -> Step:
    if isinstance(step, Conv):
        return step._replace(channels=scaled_channels(step.channels, width, published))
    if isinstance(step, Fork):
        return Fork(tuple(scaled(branch, width, published) for branch in step.branches))
    return step


def _windows(side_px: int, kernel_px: int, stride_px: int, padding_px: int) -> int:
    padded_px = side_px + 2 * padding_px
    return 0 if not side_px or padded_px < kernel_px else (padded_px - kernel_px) // stride_px + 1

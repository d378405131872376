"""The steps of a convolutional layer as plain data: convolutions, poolings, norms and forks.

A layer of the chain families (AlexNet, VGG, inception, ...) is a tuple of steps, which
`blocks.chain.Chain` runs. The same tuple gives the size of its feature map, so no size is written
twice.

Operators are the finest parts of a model's layers, with the operators that they read. A layer whose
steps fork is divided into its steps, including those of each branch, and the joins of its forks;
any other layer is one operator. So a model is a chain of layers, some of which contain branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gems.models.layer import Layer

_CHAIN = "gems.models.blocks.chain:Chain"


class Conv(NamedTuple):
    """A convolution, followed by the configured norm and ReLU if `activates`.

    Sizes are (height, width) in pixels.
    """

    channels: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int]
    activates: bool = True


class Pool(NamedTuple):
    """A pooling; `how` is "max" or "average" (which counts the padded zeros)."""

    how: str
    kernel: int
    stride: int
    padding: int


class LocalNorm(NamedTuple):
    """Local response normalisation over `channels` neighbouring channels.

    Source: Krizhevsky et al. 2012, section 3.3.
    """

    channels: int


class Fork(NamedTuple):
    """Branches that read the same input; their outputs are concatenated along the channels."""

    branches: tuple[tuple[Step, ...], ...]


Step = Conv | Pool | LocalNorm | Fork


def conv(
    channels: int, kernel: int | tuple[int, int] = 1, stride: int = 1, is_padded: bool = True
) -> Conv:
    """Return a convolution; if padded, an odd kernel gives ceil(side / stride) pixels per side."""
    sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (sizes[0] // 2, sizes[1] // 2) if is_padded else (0, 0)
    return Conv(channels, sizes, stride, padding)


def max_pool(kernel: int, stride: int, padding: int = 0) -> Pool:
    """Return a max pooling."""
    return Pool("max", kernel, stride, padding)


def chain_layer(
    name: str,
    kind: str,
    in_channels: int,
    steps: tuple[Step, ...],
    norm: str,
    carried: tuple[str, ...] = (),
) -> Layer:
    """Return the layer that runs `steps` and passes on its output and the `carried` tensors."""
    options = (("in_channels", in_channels), ("steps", steps), ("norm", norm), ("carried", carried))
    return Layer(name, kind, _CHAIN, options)


def channels_after(in_channels: int, steps: Sequence[Step]) -> int:
    """Return the channels of the feature map after `steps`."""
    for step in steps:
        if isinstance(step, Conv):
            in_channels = step.channels
        elif isinstance(step, Fork):
            in_channels = sum(channels_after(in_channels, branch) for branch in step.branches)
    return in_channels


def side_after(side_px: int, steps: Iterable[Step]) -> int:
    """Return the height of the feature map after `steps`, or 0 if a window does not fit.

    The same holds for the width: kernels that are not square are padded, so both sides change
    alike.
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
    """Return a side of the last map that a convolution makes and its norm sees.

    It is 0 if the image is too small.
    """
    normed_px = side_px
    for step in steps:
        side_px = side_after(side_px, (step,))
        if isinstance(step, (Conv, Fork)):
            normed_px = side_px
    return normed_px if side_px else 0


def stride_after(steps: Iterable[Step]) -> int:
    """Return the number of source pixels per side that one pixel after `steps` covers."""
    stride = 1
    for step in steps:
        if isinstance(step, Fork):
            stride *= stride_after(step.branches[0])
        elif isinstance(step, (Conv, Pool)):
            stride *= step.stride
    return stride


def scaled(steps: tuple[Step, ...], width: int, published: int) -> tuple[Step, ...]:
    """Return the steps with their channels times width / published, rounded down, at least one."""
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Conv):
            step = step._replace(channels=scaled_channels(step.channels, width, published))
        elif isinstance(step, Fork):
            step = Fork(tuple(scaled(branch, width, published) for branch in step.branches))
        out.append(step)
    return tuple(out)


def scaled_channels(channels: int, width: int, published: int) -> int:
    """Return the channels times width / published, rounded down, at least one."""
    return max(1, channels * width // published)


def _windows(side_px: int, kernel_px: int, stride_px: int, padding_px: int) -> int:
    padded_px = side_px + 2 * padding_px
    return 0 if not side_px or padded_px < kernel_px else (padded_px - kernel_px) // stride_px + 1


@dataclass(frozen=True, slots=True)
class Operator:
    """A part of a layer.

    `path` is the path of a step's module within the module of its layer, "" for a whole layer, or
    None for a join, which concatenates its inputs along the channels. `predecessors` are the
    operators that it reads, in order; the first operator has none.
    """

    name: str
    layer: int
    path: str | None
    predecessors: tuple[int, ...]


def whole_layers(layers: Sequence[Layer]) -> tuple[Operator, ...]:
    """Return each layer of a model as one operator."""
    return tuple(
        Operator(layer.name, index, "", (index - 1,) if index else ())
        for index, layer in enumerate(layers)
    )


def operators_of(layers: Sequence[Layer]) -> tuple[Operator, ...]:
    """Return the operators of a model, each after those that it reads."""
    operators: list[Operator] = []
    for index, layer in enumerate(layers):
        last = len(operators) - 1
        options = dict(layer.options)
        steps = options["steps"] if layer.target == _CHAIN and not options.get("carried") else ()
        if not any(isinstance(step, Fork) for step in steps):
            operators.append(Operator(layer.name, index, "", (last,) if last >= 0 else ()))
            continue
        _add_steps(operators, layer.name, index, steps, "steps", last)
    return tuple(operators)


def num_branching(operators: Sequence[Operator]) -> int:
    """Return the number of layers that fork."""
    return len({operator.layer for operator in operators if operator.path is None})


def _add_steps(
    operators: list[Operator], name: str, layer: int, steps: Sequence[Step], path: str, last: int
) -> int:
    """Add consecutive steps after operator `last`, and return the number of the last of them."""
    for number, step in enumerate(steps):
        here = f"{path}.{number}"
        if not isinstance(step, Fork):
            operators.append(
                Operator(
                    f"{name}.{here.removeprefix('steps.')}",
                    layer,
                    here,
                    (last,) if last >= 0 else (),
                )
            )
            last = len(operators) - 1
            continue
        ends = tuple(
            _add_steps(operators, name, layer, branch, f"{here}.branches.{which}", last)
            for which, branch in enumerate(step.branches)
        )
        operators.append(Operator(f"{name}.{here.removeprefix('steps.')}.join", layer, None, ends))
        last = len(operators) - 1
    return last

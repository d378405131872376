"""A layer that runs steps in sequence (convolutions, poolings, forks), and parts of layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gems.models.blocks.parts import conv2d, norm2d
from gems.models.steps import Conv, Fork, LocalNorm, Operator, Pool, Step, channels_after


class ConvUnit(nn.Sequential):
    """A convolution, followed by norm and ReLU if `activate`.

    Input (N, in_channels, H, W), output (N, out_channels, H', W'). If `padding` is None and the
    kernel is odd, H' = ceil(H / stride).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        stride: int,
        norm: str,
        activate: bool = True,
        padding: int | tuple[int, int] | None = None,
    ) -> None:
        conv = conv2d(in_channels, out_channels, kernel, stride, norm, padding)
        activation = (
            nn.Sequential(norm2d(norm, out_channels), nn.ReLU()) if activate else nn.Identity()
        )
        super().__init__(OrderedDict(conv=conv, activation=activation))


class Branches(nn.Module):
    """Branches that read the same input; their outputs are concatenated along the channels.

    Input (N, C, H, W), output (N, sum of the branches' channels, H', W').
    """

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Chain(nn.Module):
    """A layer that runs `steps` on its first tensor and passes on the `carried` tensors unchanged.

    Input (N, in_channels, H, W), output (N, C', H', W') according to the steps.
    """

    def __init__(
        self, in_channels: int, steps: tuple[Step, ...], norm: str, carried: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.steps = _run(in_channels, steps, norm)
        self.output_names = ("main", *carried) if carried else ()

    def forward(self, x: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        out: Tensor = self.steps(x)
        return (out, *carried) if carried else out


def _run(in_channels: int, steps: Sequence[Step], norm: str) -> nn.Sequential:
    made: list[nn.Module] = []
    for step in steps:
        made.append(_module(in_channels, step, norm))
        in_channels = channels_after(in_channels, (step,))
    return nn.Sequential(*made)


def _module(in_channels: int, step: Step, norm: str) -> nn.Module:
    if isinstance(step, Conv):
        return ConvUnit(
            in_channels, step.channels, step.kernel, step.stride, norm, step.activates, step.padding
        )
    if isinstance(step, Fork):
        return Branches([_run(in_channels, branch, norm) for branch in step.branches])
    if isinstance(step, LocalNorm):
        return nn.LocalResponseNorm(step.channels)
    assert isinstance(step, Pool)
    pool = nn.MaxPool2d if step.how == "max" else nn.AvgPool2d
    return pool(step.kernel, step.stride, step.padding)


class Join(nn.Module):
    """A concatenation of branches along the channels.

    Inputs (N, C_1, H, W), (N, C_2, H, W), ..., output (N, sum of C, H, W).
    """

    def forward(self, *branches: Tensor) -> Tensor:
        return torch.cat(branches, 1)


class Inner(nn.Module):
    """A part of a layer; its parameters keep the names that they have in the layer."""

    def __init__(self, whole: nn.Module, path: str) -> None:
        super().__init__()
        adopt(self, whole, path)
        # a list, so that the module is not registered under a second name
        self._run = [whole.get_submodule(path)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._run[0](x)
        return out


def adopt(part: nn.Module, whole: nn.Module, path: str) -> None:
    """Give `part` the module, parameter or buffer of `whole` at `path`, at the same path."""
    *folders, name = path.split(".")
    into = part
    source = whole
    for folder in folders:
        source = source.get_submodule(folder)
        if folder not in into._modules:
            into.add_module(folder, nn.Module())
        into = into.get_submodule(folder)
        if into is source:  # already adopted as a whole
            return
    if name in source._modules:
        into.add_module(name, source.get_submodule(name))
    elif name in source._parameters:
        into.register_parameter(name, source._parameters[name])
    else:
        into.register_buffer(
            name, source._buffers[name], name not in source._non_persistent_buffers_set
        )


def operator_module(operator: Operator, whole: nn.Module) -> nn.Module:
    """Return the module of an operator, given the module `whole` of its layer."""
    if operator.path is None:
        return Join()
    return Inner(whole, operator.path) if operator.path else whole

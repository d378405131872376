"""Layers in strips against the same layers on the whole image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, ModelConfig
from gems.models import layers_of
from gems.models.build import build_layers
from gems.streaming.strip_sample import StripSample
from gems.streaming.strip_stage import Boundary, StripStage, trace_stage
from gems.streaming.trace import LayerTrace

DTYPE = torch.float64
TOLERANCE = 1e-12
Layers = Sequence[tuple[str, nn.Module]]
Traces = dict[tuple[int, int], LayerTrace]
Ends = tuple[int, ...] | tuple[tuple[int, ...], ...]  # of strips of rows, or of parts of each axis
Case = tuple[Ends, int] | tuple[Ends, int, int]


class Function(nn.Module):
    """A function of the module and its inputs as a layer, with modules for its parameters."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(self, *tensors)


def zoo(model: ModelConfig, height_px: int, width_px: int) -> list[tuple[str, nn.Module]]:
    """Return the layers of a network in float64; a norm has statistics of its own, and keeps them."""
    data = DataConfig(height_px=height_px, width_px=width_px)
    layers = layers_of(model, data)
    modules = build_layers(layers, 0, len(layers), 0, DTYPE)
    for module in modules:
        for norm in (each for each in module.modules() if isinstance(each, nn.BatchNorm2d)):
            freeze(norm)
    return [(layer.name, module) for layer, module in zip(layers, modules, strict=True)]


def freeze(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    norm.running_mean.normal_()  # type: ignore[union-attr]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return norm.eval()


def run_whole(layers: Layers, image: Tensor) -> tuple[Tensor, ...]:
    values: tuple[Tensor, ...] = (image,)
    for _, module in layers:
        values = as_tuple(module(*values))
    return values


def cut_stages(
    layers: Layers,
    image: Tensor,
    ends: Ends,
    num_stages: int = 1,
    traces: Traces | None = None,
    min_positions: int = 1,
) -> list[StripStage]:
    """Return the layers as stages, each of which takes what the one before gives.

    `traces` are made once.
    """
    traces = {} if traces is None else traces
    boundaries: Sequence[Boundary] = [boundary_of(image, ends)]
    grid = [len(each) for each in boundaries[0].ends or ()]
    cuts = [len(layers) * stage // num_stages for stage in range(num_stages + 1)]
    stages = []
    for first, last in pairwise(cuts):
        if (first, last) not in traces:
            traces[first, last] = trace_stage(layers[first:last], boundaries)
        stages.append(StripStage(traces[first, last], boundaries, grid, min_positions))
        boundaries = stages[-1].outputs
    return stages


def boundary_of(image: Tensor, ends: Ends) -> Boundary:
    """Return the images in strips of rows, or in blocks."""
    by_axis = tuple(each if isinstance(each, tuple) else () for each in ends)
    parts = by_axis if all(by_axis) else (tuple(map(int, ends)),)  # type: ignore[call-overload]
    dims = tuple(range(2, 2 + len(parts)))
    return Boundary(tuple(image.shape), image.dtype, parts, dims)


def error(layers: Layers, image: Tensor, cases: Sequence[Case], draws: Any = None) -> float:
    """Return the largest relative error of outputs and of gradients of image and parameters.

    Each case has the ends of strips, a number of stages and perhaps the least positions of a strip.
    Shapes of outputs and of what is kept are compared with those that were planned.
    """
    parameters = [parameter for _, module in layers for parameter in module.parameters()]
    leaf = image.clone().requires_grad_()
    wanted = run_whole(layers, leaf)
    given = [torch.randn_like(output) for output in wanted]
    torch.autograd.backward(wanted, given)
    expected = [parameter.grad for parameter in parameters]
    traces: Traces = {}
    errors = []
    for ends, num_stages, *least in cases:
        for parameter in parameters:
            parameter.grad = None
        stages = cut_stages(layers, image, ends, num_stages, traces, *least)
        outputs, found = run_strips(stages, image, ends, given, draws)
        errors += [relative(output, whole) for output, whole in zip(outputs, wanted, strict=True)]
        errors.append(relative(found, leaf.grad))
        errors += [
            relative(parameter.grad, whole)
            for parameter, whole in zip(parameters, expected, strict=True)
        ]
    for parameter in parameters:
        parameter.grad = None
    return max(errors)


def run_strips(
    stages: Sequence[StripStage],
    image: Tensor,
    ends: Ends,
    given: Sequence[Tensor],
    draws: Any = None,
) -> tuple[list[Tensor], Tensor]:
    """Return the outputs and the image's gradient of strips that run through stages, with copies between them."""
    samples = [StripSample(stage, draws) for stage in stages]
    made: list[tuple[Tensor | None, ...]] = []
    images = boundary_of(image, ends)
    strips = stages[0].strips
    for strip in range(strips):
        values: tuple[Tensor | None, ...] = (images.cut(image, strip).clone(),)
        for stage, sample in zip(stages, samples, strict=True):
            values = sample.forward([None if value is None else value.clone() for value in values])
            taken = [stage.carries(source)[place] for source, place in stage.given(strip + 1)]
            assert [(tuple(kept.shape), kept.dtype) for kept in sample.carried] == taken
            for boundary, value in zip(stage.outputs, values, strict=True):
                if value is not None:
                    assert (tuple(value.shape), value.dtype) == (
                        boundary.strip_shape(strip),
                        boundary.dtype,
                    )
        made.append(values)
    outputs = stages[-1].outputs
    joined = [
        boundary.joined([each[place] for each in made]) for place, boundary in enumerate(outputs)
    ]
    gradients: list[Tensor | None] = []
    for strip in reversed(range(strips)):
        back: Sequence[Tensor | None] = [
            (
                (whole if strip == strips - 1 else None)
                if boundary.ends is None
                else boundary.cut(whole, strip)
            )
            for boundary, whole in zip(outputs, given, strict=True)
        ]
        for sample in reversed(samples):
            back = sample.backward(back)
        (gradient,) = back
        gradients.append(
            torch.zeros_like(images.cut(image, strip)) if gradient is None else gradient
        )
    return joined, images.joined(gradients[::-1])


def spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


def relative(found: Tensor | None, wanted: Tensor | None) -> float:
    """Return the largest difference over the largest value; infinite where one is missing."""
    if wanted is None or not wanted.any():
        return 0.0 if found is None or not found.any() else float("inf")
    if found is None or found.shape != wanted.shape:
        return float("inf")
    return float(((found - wanted).abs().max() / wanted.abs().max()).detach())

"""A model in one piece against the same model as stages: equal to the bit in float64 on one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, ModelConfig
from gems.engine.stages.whole import WholeStage
from gems.models import Layer, layers_of
from gems.models.build import build_layers

DTYPE = torch.float64


@dataclass(frozen=True, slots=True)
class Played:
    """What one forward and backward left.

    Everything by name, so that a difference says where it is.
    """

    output: Tensor
    loss: Tensor
    input_gradient: Tensor | None
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def assert_cut_equals_whole(
    model: ModelConfig,
    data: DataConfig,
    parts: int = 4,
    batch_size: int = 2,
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
    is_split: bool = False,
) -> None:
    """Run forward and backward of the model whole and cut into `parts` stages, and compares bit for bit.

    Compared are the loss, the input's gradient, all parameters' gradients, all buffers after the
    step, and the outputs without dropout and with running statistics. No layer may change a tensor
    that it was given. Every parameter must have a gradient.

    Args:
        model: a configured network of at least `parts` layers.
        data: channels, height_px, width_px and num_classes of the images.
        parts: stages, as equal in layers as can be.
        batch_size: samples of the one micro-batch.
        inputs: instead of images drawn from a normal distribution, e.g. tokens (int64), which have
            no gradient.
        labels: instead of classes drawn at random; what cross-entropy takes with the last layer's
            output.
        is_split: the stages split their backward into input and weight gradient.
    """
    layers = layers_of(model, data)
    assert len(layers) >= parts, f"{len(layers)} layers do not give {parts} parts"
    random = torch.Generator().manual_seed(1)
    if inputs is None:
        shape = (batch_size, data.channels, data.height_px, data.width_px)
        inputs = torch.randn(shape, dtype=DTYPE, generator=random)
    if labels is None:
        labels = torch.randint(data.num_classes, (len(inputs),), generator=random)
    whole = play_whole(layers, inputs, labels)
    cut = play_cut(layers, even_cuts(len(layers), parts), inputs, labels, is_split)
    assert whole.gradients, "no parameters"
    assert whole.gradients.keys() == cut.gradients.keys(), "cut and whole have other parameters"
    assert whole.buffers.keys() == cut.buffers.keys(), "cut and whole have other buffers"
    endless = [name for name, value in whole.gradients.items() if not torch.isfinite(value).all()]
    assert not endless, f"no finite gradient of {', '.join(endless)}"
    differing = [
        name for name, value in whole.gradients.items() if not same(value, cut.gradients[name])
    ]
    differing += [
        name for name, value in whole.buffers.items() if not same(value, cut.buffers[name])
    ]
    differing += [
        name
        for name in ("output", "loss", "input_gradient")
        if not same(getattr(whole, name), getattr(cut, name))
    ]
    assert not differing, f"cut and whole differ in {', '.join(differing)}"


def play_whole(layers: Sequence[Layer], inputs: Tensor, labels: Tensor) -> Played:
    """Run all layers under one autograd graph."""
    modules = nn.ModuleList(build_layers(layers, 0, len(layers), 0, DTYPE))
    leaf = inputs.clone().requires_grad_(inputs.is_floating_point())
    values: tuple[Tensor, ...] = (leaf,)
    for layer, module in zip(layers, modules, strict=True):
        versions = [value._version for value in values]
        given = values
        values = as_tuple(module(*values))
        assert [value._version for value in given] == versions, f"{layer.name} works in place"
    (output,) = values
    loss = functional.cross_entropy(output, labels)
    torch.autograd.backward(loss)
    output = evaluate([modules], inputs)
    return Played(output, loss.detach(), leaf.grad, *_left(layers, modules))


def play_cut(
    layers: Sequence[Layer],
    cuts: Sequence[int],
    inputs: Tensor,
    labels: Tensor,
    is_split: bool = False,
) -> Played:
    """Run the layers as stages: tensors are detached at each boundary, and their gradients handed back."""
    pieces = [
        nn.ModuleList(build_layers(layers, first, last, 0, DTYPE)) for first, last in pairwise(cuts)
    ]
    stages = [WholeStage(piece, is_first=False, poll=lambda: None) for piece in pieces]
    values: tuple[Tensor, ...] = (inputs.clone(),)
    for stage in stages:
        loss = (
            (lambda output: functional.cross_entropy(output, labels))
            if stage is stages[-1]
            else None
        )
        values = stage.forward(0, values, loss, is_split)
        # what crosses between ranks is a copy in memory of its own
        values = tuple(value.clone() for value in values)
    gradients: tuple[Tensor, ...] = (torch.ones_like(values[0]),)
    for stage in reversed(stages):
        backward = stage.backward_input if is_split else stage.backward
        gradients, _ = backward(0, gradients)
        gradients = tuple(gradient.clone() for gradient in gradients)
    for stage in reversed(stages) if is_split else ():
        stage.backward_weight(0)
    modules = nn.ModuleList(module for piece in pieces for module in piece)
    output = evaluate(pieces, inputs)
    return Played(output, values[0], gradients[0] if gradients else None, *_left(layers, modules))


def evaluate(pieces: Sequence[nn.ModuleList], inputs: Tensor) -> Tensor:
    """Return the output with running statistics, each piece by `Stage.infer`."""
    values: tuple[Tensor, ...] = (inputs,)
    for piece in pieces:
        piece.eval()
        values = as_tuple(WholeStage(piece, is_first=False, poll=lambda: None).infer(values))
    (output,) = values
    return output


def even_cuts(num_layers: int, parts: int) -> list[int]:
    """Return the boundaries of `parts` runs of layers that differ by one layer at most."""
    return [num_layers * part // parts for part in range(parts + 1)]


def same(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, or both are none."""
    return left is right if left is None or right is None else torch.equal(left, right)


def _left(
    layers: Sequence[Layer], modules: nn.ModuleList
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for layer, module in zip(layers, modules, strict=True):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, f"{layer.name}.{name} has no gradient"
            gradients[f"{layer.name}.{name}"] = parameter.grad
        buffers |= {f"{layer.name}.{name}": buffer for name, buffer in module.named_buffers()}
    return gradients, buffers

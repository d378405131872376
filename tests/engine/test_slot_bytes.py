"""The predicted bytes of a slot of CUDA graphs, beside the storages of a real stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from gems.autograd.outputs import tensors_in
from gems.autograd.storages import new_bytes, storage_addresses
from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.engine.stages.layer_graphs import Pass, last_output
from gems.engine.stages.whole import WholeStage
from gems.models import layers_of
from gems.models.build import build_layers, input_spec
from gems.profile.profilers.fake import fake_profile
from gems.profile.spans import Spans, Table

MODELS = {
    "resnet": ModelConfig(name="resnet", depth=11, version=2),
    "unet": ModelConfig(name="unet", depth=2, width=4),
    "vgg": ModelConfig(name="vgg", depth=11),
    "googlenet": ModelConfig(name="googlenet"),
}
DATA = DataConfig(name="synthetic", height_px=32, width_px=32, num_classes=5)


@cache
def spans_of(name: str) -> Spans:
    profile = fake_profile(MODELS[name], DATA, 2, "float32", MachineConfig(device="cuda"))
    return Spans(profile)


PASSES: dict[str, tuple[Callable[[Spans], Table], dict[str, bool]]] = {
    "whole": (lambda spans: spans.slot, {}),
    "split": (lambda spans: spans.slot + spans.slot_for_weights, {"is_split": True}),
    "later segment": (lambda spans: spans.segment_slot, {"is_complete": False}),
}


def fixed_bytes(
    stage: WholeStage, inputs: tuple[Tensor, ...], options: dict[str, bool]
) -> tuple[int, tuple[Tensor, ...]]:
    """Return the bytes of the storages that graphs of a stage hold, and its outputs."""
    alive = list(inputs)

    def save(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        return tensor

    wanted = [tensor.is_floating_point() and not stage.is_first for tensor in inputs]
    way = Pass(stage, partial(last_output, stage), wanted, **options)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        outputs = tuple(tensors_in(way.forward(inputs)))
    gradients = [torch.ones_like(each) for each in outputs if each.is_floating_point()]
    made = [each for each in way.backward(gradients) if each is not None]
    if way.deferred is not None:
        made += way.deferred.tensors()
    state = storage_addresses([*stage.modules.parameters(), *stage.modules.buffers()])
    return new_bytes([*alive, *outputs, *gradients, *made], state), outputs


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", MODELS)
def test_a_slot_has_the_storages_of_a_real_stage(name: str, size: int, way: str) -> None:
    predict, options = PASSES[way]
    slots = predict(spans_of(name))
    layers = layers_of(MODELS[name], DATA)
    num = len(layers)
    inputs: tuple[Tensor, ...] = (torch.randn(input_spec(DATA, 2).shape),)
    for first in range(0, num, size):
        end = min(num, first + size)
        modules = nn.ModuleList(build_layers(layers, first, end, 0))
        stage = WholeStage(modules, first == 0, lambda: None)
        counted, outputs = fixed_bytes(stage, inputs, options)
        names = [layer.name for layer in layers[first:end]]
        assert slots[first, end] == counted, names
        inputs = tuple(each.clone() for each in outputs)

"""The image classifiers of the zoo.

As published, by their files in conf/model, and small enough to run in a test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import yaml
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, ModelConfig
from gems.models import layers_of
from gems.models.build import build_layers

PRESETS = Path(__file__).resolve().parents[2] / "conf" / "model"

# family -> a small network of it, and the smallest side of an image that it takes
SMALL: dict[str, tuple[ModelConfig, int]] = {
    "alexnet": (ModelConfig(name="alexnet", width=8, norm="none"), 63),
    "overfeat": (ModelConfig(name="overfeat", width=6, norm="none"), 71),
    "vgg16": (ModelConfig(name="vgg", depth=16, width=8, norm="none"), 32),
    "vgg11_batch": (ModelConfig(name="vgg", depth=11, width=8, norm="batch"), 32),
    "vgg116": (ModelConfig(name="vgg", depth=116, width=4, norm="none"), 32),
    "googlenet": (ModelConfig(name="googlenet", width=8, norm="none"), 32),
    "googlenet_batch": (ModelConfig(name="googlenet", width=8, norm="batch"), 32),
    "inception_v3": (ModelConfig(name="inception_v3", width=4), 75),
    "inception_v3_auxiliary": (ModelConfig(name="inception_v3", width=4, auxiliary=True), 75),
    "resnet18": (ModelConfig(name="resnet_imagenet", depth=18, width=4), 32),
    "resnet50": (ModelConfig(name="resnet_imagenet", depth=50, width=4), 32),
    "resnet20": (ModelConfig(name="resnet", depth=20, width=4), 4),
    "resnet20_v2": (ModelConfig(name="resnet", depth=20, version=2, width=4), 4),
    "nf_resnet50": (
        ModelConfig(name="resnet_imagenet", depth=50, version=2, width=4, norm="normalizer_free"),
        32,
    ),
    "convnext_tiny": (ModelConfig(name="convnext", depth=18, width=4, norm="layer"), 32),
}


def published(preset: str, **changes: object) -> ModelConfig:
    """Return the model of conf/model/<preset>.yaml, with changes."""
    values = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())
    return replace(ModelConfig(**values), **changes)


def num_parameters(model: ModelConfig, data: DataConfig | None = None) -> int:
    """Count the parameters, without memory for any; of 1000 classes and 3 channels without `data`."""
    layers = layers_of(model, data or DataConfig(num_classes=1000))
    modules = build_layers(layers, 0, len(layers), seed=0, device="meta")
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def run_all(modules: Iterable[nn.Module], *values: Tensor) -> tuple[Tensor, ...]:
    """Run modules one after the other, and return the output of the last one as tensors."""
    for module in modules:
        values = as_tuple(module(*values))
    return values

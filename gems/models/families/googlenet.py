"""GoogLeNet (Szegedy et al. 2014, arXiv 1409.4842, table 1) as named layers; an inception block is one layer.

Without the two auxiliary classifiers, which the network has in training only. Published with dropout 0.4 in front of
the linear map, without norm but for local response normalisation behind conv1 and conv3: `norm=none` gives these,
another norm takes their place.
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.models.families.backbone import Backbone, Part
from gems.models.families.checks import check_classifier
from gems.models.layer import MODELS, Layer, ModelFamily
from gems.models.steps import LocalNorm, Step, conv, fork, max_pool

_WIDTH = 64
_HALVE = max_pool(3, 2, 1)
# name: 1x1 | 1x1 before the 3x3, 3x3 | 1x1 before the 5x5, 5x5 | 1x1 behind the pooling
_BLOCKS = {
    "inception3a": (64, (96, 128), (16, 32), 32),
    "inception3b": (128, (128, 192), (32, 96), 64),
    "inception4a": (192, (96, 208), (16, 48), 64),
    "inception4b": (160, (112, 224), (24, 64), 64),
    "inception4c": (128, (128, 256), (24, 64), 64),
    "inception4d": (112, (144, 288), (32, 64), 64),
    "inception4e": (256, (160, 320), (32, 128), 128),
    "inception5a": (256, (160, 320), (32, 128), 128),
    "inception5b": (384, (192, 384), (48, 128), 128),
}
_BEFORE_HALVING = ("inception3b", "inception4e")


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return conv1, conv2, conv3, inception3a ... inception5b, head; poolings are part of the layer before.

    Raises ConfigError for a norm, width or dropout that no such network has.
    """
    check_classifier(model)
    backbone = _backbone(model)
    head = (
        ("in_channels", backbone.channels(model.width)),
        ("num_classes", data.num_classes),
        ("norm", model.norm),
        ("activate", False),
        ("dropout_rate", model.dropout),
    )
    return (
        *backbone.layers(data.channels, model.width, model.norm),
        Layer("head", "head", "gems.models.blocks.heads:Head", head),
    )


def stride_px(model: ModelConfig) -> int:
    """Return 32."""
    return _backbone(model).stride_px


def _backbone(model: ModelConfig) -> Backbone:
    local: tuple[Step, ...] = (LocalNorm(5),) if model.norm == "none" else ()
    parts = [
        Part("conv1", "conv", (conv(64, 7, 2), _HALVE, *local)),
        Part("conv2", "conv", (conv(64),)),
        Part("conv3", "conv", (conv(192, 3), *local, _HALVE)),
    ]
    for name, (one, three, five, pooled) in _BLOCKS.items():
        block = fork(
            (conv(one),),
            (conv(three[0]), conv(three[1], 3)),
            (conv(five[0]), conv(five[1], 5)),
            (max_pool(3, 1, 1), conv(pooled)),
        )
        parts.append(Part(name, "inception", (block, _HALVE) if name in _BEFORE_HALVING else (block,)))
    return Backbone(_WIDTH, tuple(parts))


MODELS.register("googlenet", ModelFamily(layers, stride_px))

"""VGG of any depth as named layers.

Simonyan and Zisserman 2014 (arXiv 1409.1556, table 1, configurations A, B, D and E): five groups of 3x3 convolutions,
each followed by a 2x2 pooling, and three fully connected layers. Deeper than VGG-16, as Rhu et al. 2016 (vDNN, arXiv
1602.08124, section V) make it: the same number of convolutions is added to each of the five groups, so that VGG-116,
216, 316 and 416 have 100, 200, 300 and 400 more. 224x224 px give a last map of 7x7, to which other sizes are averaged.
Published with dropout 0.5 on fc1 and fc2, and without norm: zero padding then costs each layer some variance, and the
signal of VGG-416 fades to 10^-8 at 64 px. The deep ones are loads for memory and time, not networks to train.
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models.families.backbone import Backbone, Part
from gems.models.families.checks import check_classifier
from gems.models.families.fully_connected import fully_connected_layers
from gems.models.layer import MODELS, Layer, ModelFamily
from gems.models.steps import conv, max_pool

_MAP_PX = 7
_WIDTH = 64
_CHANNELS = (64, 128, 256, 512, 512)
_CONVS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_BASE = 16


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return conv1_1, conv1_2, ..., fc1, fc2, head; the last convolution of a group holds its pooling.

    Raises ConfigError for a depth, norm, width or dropout that no such network has.
    """
    check_classifier(model)
    backbone = _backbone(model)
    hidden = 64 * model.width
    classifier = fully_connected_layers(
        backbone.channels(model.width),
        _MAP_PX,
        sizes=(hidden, hidden, data.num_classes),
        dropouts=(0.0, model.dropout, model.dropout),
    )
    return (*backbone.layers(data.channels, model.width, model.norm), *classifier)


def stride_px(model: ModelConfig) -> int:
    """Return 32, whatever the depth."""
    return _backbone(model).stride_px


def normed_px(model: ModelConfig, side_px: int) -> int:
    """Return a side of the last convolution's map, 0 below 32 px."""
    return _backbone(model).normed_px(side_px)


def convs_of(depth: int) -> tuple[int, ...]:
    """Return the convolutions in each group.

    Raises ConfigError, with the nearest depths, for a depth that has no such network.
    """
    if depth in _CONVS:
        return _CONVS[depth]
    more, left = divmod(depth - _BASE, len(_CHANNELS))
    if left or more < 0:
        above = {_BASE + len(_CHANNELS) * max(1, more + step) for step in (0, 1)}
        nearest = sorted(sorted({*_CONVS, *above}, key=lambda other: (abs(other - depth), other))[:2])
        raise ConfigError(
            "model.depth",
            depth,
            "a VGG has depth 11, 13, 16, 19 or 16+5n, n >= 1",
            f"nearest: {', '.join(str(other) for other in nearest)}",
        )
    return tuple(convs + more for convs in _CONVS[_BASE])


def _backbone(model: ModelConfig) -> Backbone:
    parts: list[Part] = []
    for group, (channels, convs) in enumerate(zip(_CHANNELS, convs_of(model.depth), strict=True), 1):
        for index in range(1, convs + 1):
            pool = (max_pool(2, 2),) if index == convs else ()
            parts.append(Part(f"conv{group}_{index}", "conv", (conv(channels, 3), *pool)))
    return Backbone(_WIDTH, tuple(parts))


MODELS.register("vgg", ModelFamily(layers, stride_px, normed_px, title="{name}{depth}"))

"""VGG of any depth as named layers.

Source: Simonyan and Zisserman 2014 (arXiv 1409.1556, table 1, configurations A, B, D and E). It has
five groups of 3x3 convolutions, each followed by a 2x2 pooling, and three fully connected layers,
fc1, fc2 and head. Deeper networks than VGG-16 follow Rhu et al. 2016 (vDNN, arXiv 1602.08124,
section V): the same number of convolutions is added to each of the five groups, so VGG-116, 216,
316 and 416 have 100, 200, 300 and 400 more. 224x224 px give a last map of 7x7, to which other sizes
are averaged; a side has at least 32 px. The published network has dropout 0.5 on fc1 and fc2, and
no norm: zero padding then costs each layer some variance, and the signal of VGG-416 fades to 10^-8
at 64 px. The deep networks serve as loads for memory and time; they are not meant to be trained.
"""

from __future__ import annotations

from gems.config.schema import ModelConfig
from gems.models.families.shared import Backbone, chain_family, depth_error, fully_connected
from gems.models.layer import MODELS
from gems.models.steps import conv, max_pool

_CHANNELS = (64, 128, 256, 512, 512)
_CONVS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_BASE = 16


def backbone(model: ModelConfig) -> Backbone:
    """Return conv1_1, conv1_2, ...; the last layer of a group includes its pooling.

    Raises:
        ConfigError: The depth is unknown.
    """
    more, left = divmod(model.depth - _BASE, len(_CHANNELS))
    if model.depth not in _CONVS and (left or more < 0):
        above = {_BASE + len(_CHANNELS) * max(1, more + step) for step in (0, 1)}
        raise depth_error(
            model.depth, "a VGG has depth 11, 13, 16, 19 or 16+5n, n >= 1", {*_CONVS, *above}
        )
    groups = _CONVS.get(model.depth) or tuple(convs + more for convs in _CONVS[_BASE])
    parts = {}
    for group, (channels, convs) in enumerate(zip(_CHANNELS, groups, strict=True), 1):
        for index in range(1, convs + 1):
            pool = (max_pool(2, 2),) if index == convs else ()
            parts[f"conv{group}_{index}"] = (conv(channels, 3), *pool)
    return Backbone(64, parts)


classifier = fully_connected(7, (4096, 4096), ("fc2", "head"))
MODELS.register("vgg", chain_family(backbone, classifier, title="{name}{depth}"))

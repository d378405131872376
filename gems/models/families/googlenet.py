"""GoogLeNet (Szegedy et al. 2014, arXiv 1409.4842, table 1) as named layers.

An inception block is one layer. The two auxiliary classifiers, which exist in training only, are
left out. The published network has dropout 0.4 in front of the linear map and no norm except local
response normalisation after conv1 and conv3. `norm=none` selects these; another norm replaces them.
"""

from __future__ import annotations

from gems.config.schema import ModelConfig
from gems.models.families.shared import Backbone, chain_family, pooled_head
from gems.models.layer import MODELS
from gems.models.steps import Fork, LocalNorm, Step, conv, max_pool

_HALVE = max_pool(3, 2, 1)
# name: 1x1 | 1x1 before the 3x3, 3x3 | 1x1 before the 5x5, 5x5 | 1x1 after the pooling
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


def backbone(model: ModelConfig) -> Backbone:
    """Return conv1, conv2, conv3, inception3a ... inception5b.

    A pooling is part of the layer before it.
    """
    local: tuple[Step, ...] = (LocalNorm(5),) if model.norm == "none" else ()
    parts: dict[str, tuple[Step, ...]] = {
        "conv1": (conv(64, 7, 2), _HALVE, *local),
        "conv2": (conv(64),),
        "conv3": (conv(192, 3), *local, _HALVE),
    }
    for name, (one, three, five, pooled) in _BLOCKS.items():
        two = (conv(three[0]), conv(three[1], 3))
        last = (conv(five[0]), conv(five[1], 5))
        block = Fork(((conv(one),), two, last, (max_pool(3, 1, 1), conv(pooled))))
        parts[name] = (block, _HALVE) if name in _BEFORE_HALVING else (block,)
    return Backbone(64, parts)


MODELS.register(
    "googlenet",
    chain_family(
        backbone,
        lambda model, data, body: (pooled_head(model, data, body.channels(model.width)),),
        is_padded=True,
    ),
)

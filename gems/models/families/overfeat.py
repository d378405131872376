"""OverFeat's fast model (Sermanet et al. 2013, arXiv 1312.6229, table 1) as named layers.

Five convolutions, the first two without padding, 2x2 poolings, and three fully connected layers; 231x231 px give a
last map of 6x6, to which other sizes are averaged. Published with dropout 0.5 on fc1 and fc2, and without norm.
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.models.families.backbone import Backbone, Part
from gems.models.families.checks import check_classifier
from gems.models.families.fully_connected import fully_connected_layers
from gems.models.layer import MODELS, Layer, ModelFamily
from gems.models.steps import conv, max_pool, scaled_channels

_WIDTH = 96
_MAP_PX = 6
_HIDDEN = (3072, 4096)
_BACKBONE = Backbone(
    _WIDTH,
    (
        Part("conv1", "conv", (conv(96, 11, 4, is_padded=False), max_pool(2, 2))),
        Part("conv2", "conv", (conv(256, 5, is_padded=False), max_pool(2, 2))),
        Part("conv3", "conv", (conv(512, 3),)),
        Part("conv4", "conv", (conv(1024, 3),)),
        Part("conv5", "conv", (conv(1024, 3), max_pool(2, 2))),
    ),
)


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return conv1 ... conv5 with their poolings, fc1, fc2, head.

    Raises ConfigError for a norm, width or dropout that no such network has.
    """
    check_classifier(model)
    features = _BACKBONE.layers(data.channels, model.width, model.norm)
    first, second = (scaled_channels(size, model.width, _WIDTH) for size in _HIDDEN)
    classifier = fully_connected_layers(
        _BACKBONE.channels(model.width),
        _MAP_PX,
        sizes=(first, second, data.num_classes),
        dropouts=(model.dropout, model.dropout, 0.0),
    )
    return (*features, *classifier)


def stride_px(model: ModelConfig) -> int:
    """Return 32."""
    return _BACKBONE.stride_px


def normed_px(model: ModelConfig, side_px: int) -> int:
    """Return a side of the last convolution's map, 0 below 71 px."""
    return _BACKBONE.normed_px(side_px)


MODELS.register("overfeat", ModelFamily(layers, stride_px, normed_px))

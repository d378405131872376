"""AlexNet in the single-tower layout of Krizhevsky 2014 (arXiv 1404.5997, "one weird trick") as named layers.

Five convolutions and three fully connected layers; 224x224 px give a last map of 6x6, to which other sizes are
averaged. Published with dropout 0.5 in front of fc1 and fc2, and without norm.
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.models.families.backbone import Backbone, Part
from gems.models.families.checks import check_classifier
from gems.models.families.fully_connected import fully_connected_layers
from gems.models.layer import MODELS, Layer, ModelFamily
from gems.models.steps import Conv, conv, max_pool

_MAP_PX = 6
_BACKBONE = Backbone(
    64,
    (
        Part("conv1", "conv", (Conv(64, (11, 11), 4, (2, 2)), max_pool(3, 2))),
        Part("conv2", "conv", (conv(192, 5), max_pool(3, 2))),
        Part("conv3", "conv", (conv(384, 3),)),
        Part("conv4", "conv", (conv(256, 3),)),
        Part("conv5", "conv", (conv(256, 3), max_pool(3, 2))),
    ),
)


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return conv1 ... conv5 with their poolings, fc1, fc2, head.

    Raises ConfigError for a norm, width or dropout that no such network has.
    """
    check_classifier(model)
    features = _BACKBONE.layers(data.channels, model.width, model.norm)
    hidden = 64 * model.width
    classifier = fully_connected_layers(
        _BACKBONE.channels(model.width),
        _MAP_PX,
        sizes=(hidden, hidden, data.num_classes),
        dropouts=(model.dropout, model.dropout, 0.0),
    )
    return (*features, *classifier)


def stride_px(model: ModelConfig) -> int:
    """Return 32."""
    return _BACKBONE.stride_px


def normed_px(model: ModelConfig, side_px: int) -> int:
    """Return a side of the last convolution's map, 0 below 63 px."""
    return _BACKBONE.normed_px(side_px)


MODELS.register("alexnet", ModelFamily(layers, stride_px, normed_px))

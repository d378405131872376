"""The residual networks for ImageNet (He et al. 2015, arXiv 1512.03385, table 1) as named layers.

A 7x7 convolution and a pooling, four stages of residual blocks whose maps halve at stages 2 to 4, and a head of global
average pooling and one linear map. Depths 18 and 34 have basic blocks, 50, 101 and 152 bottlenecks; shortcuts are
projections where the shape changes (option B).
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError, one_of
from gems.models.families.backbone import Backbone, Part
from gems.models.families.checks import check_classifier, check_depth
from gems.models.layer import MODELS, Layer, ModelFamily
from gems.models.steps import conv, max_pool

_WIDTH = 64
_STEM = Backbone(_WIDTH, (Part("stem", "conv", (conv(_WIDTH, 7, 2), max_pool(3, 2, 1))),))
# depth: blocks a stage, and how many times wider a block's output is than its inside
_DEPTHS = {
    18: ((2, 2, 2, 2), 1),
    34: ((3, 4, 6, 3), 1),
    50: ((3, 4, 6, 3), 4),
    101: ((3, 4, 23, 3), 4),
    152: ((3, 8, 36, 3), 4),
}
_BLOCKS = {1: "basic", 4: "bottleneck"}
_TARGETS = "gems.models.blocks"


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return stem, stage1.block1, ..., head for `data`'s channels and classes.

    Raises ConfigError for a depth, version, block, shortcut, norm, width or dropout that no such network has.
    """
    _check(model)
    blocks, expansion = _DEPTHS[model.depth]
    out = _STEM.layers(data.channels, model.width, model.norm)
    in_channels = model.width
    for stage, num_blocks in enumerate(blocks):
        inner = model.width << stage
        for index in range(num_blocks):
            options = (
                ("in_channels", in_channels),
                ("inner_channels", inner),
                ("out_channels", inner * expansion),
                ("stride", 2 if stage and not index else 1),
                ("bottleneck", expansion > 1),
                ("shortcut", "identity" if model.shortcut == "identity" else "projection"),
                ("norm", model.norm),
                ("num_blocks", sum(blocks)),
            )
            name = f"stage{stage + 1}.block{index + 1}"
            out.append(Layer(name, "residual", f"{_TARGETS}.residual:PostActivationBlock", options))
            in_channels = inner * expansion
    head = (
        ("in_channels", in_channels),
        ("num_classes", data.num_classes),
        ("norm", model.norm),
        ("activate", False),
        ("dropout_rate", model.dropout),
    )
    return (*out, Layer("head", "head", f"{_TARGETS}.heads:Head", head))


def stride_px(model: ModelConfig) -> int:
    """Return 32: the stem shrinks the image 4 times, and stages 2 to 4 halve it."""
    return _STEM.stride_px << 3


def _check(model: ModelConfig) -> None:
    check_classifier(model)
    check_depth(model, tuple(_DEPTHS))
    block = _BLOCKS[_DEPTHS[model.depth][1]]
    for key, value, valid in (
        ("model.version", str(model.version), ("1",)),
        ("model.block", model.block, ("auto", block)),
        ("model.shortcut", model.shortcut, ("auto", "identity", "projection")),
    ):
        if value not in valid:
            raise ConfigError(key, value, one_of(valid))


MODELS.register("resnet_imagenet", ModelFamily(layers, stride_px, title="{name}{depth}"))

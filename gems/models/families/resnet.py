"""Residual networks as named layers: CIFAR networks of any depth, and ImageNet networks.

`resnet` has the CIFAR form. Version 1 is He et al. 2015 (arXiv 1512.03385, section 4.2), version 2
the pre-activation form of He et al. 2016 (arXiv 1603.05027). It has a 3x3 stem, three stages of n
residual blocks whose feature maps halve at stages 2 and 3, and a head of global average pooling and
one linear map. A basic block has two 3x3 convolutions, so depth = 6n + 2; a bottleneck block has
1x1, 3x3 and 1x1 convolutions to four times its width, so depth = 9n + 2.

`resnet_imagenet` (arXiv 1512.03385, table 1) has a 7x7 convolution and a pooling, four stages whose
maps halve at stages 2 to 4, and the same head. Depths 18 and 34 have basic blocks; 50, 101 and 152
have bottlenecks. Shortcuts are projections if the shape changes (option B). In version 2 the first
block activates the output of the stem.

Version 2 with `model.norm=normalizer_free` is the NF-ResNet (Brock, De and Smith 2021, arXiv
2101.08692, section 3). It has no norm, but convolutions with standardized weights, and residual
branches scaled by 0.2. The input of each block is divided by its standard deviation at
initialization, which grows with each block and is 1 again after a projection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError, one_of
from gems.models.families.shared import (
    NORMS,
    Backbone,
    check_choice,
    check_classifier,
    depth_error,
    pooled_head,
)
from gems.models.layer import MODELS, Layer, ModelFamily, block
from gems.models.steps import conv, max_pool

_NUM_STAGES = 3
_CONVS = {"basic": 2, "bottleneck": 3}
# ratio of a block's output channels to its inner channels
_EXPANSION = {"basic": 1, "bottleneck": 4}
_PREFERENCE = {1: ("basic", "bottleneck"), 2: ("bottleneck", "basic")}

_NORMALIZER_FREE = "normalizer_free"
# scale of a residual branch without a normalizer
_BRANCH_SCALE = 0.2

# depth: number of blocks in each stage, and their kind
_DEPTHS = {
    18: ((2, 2, 2, 2), "basic"),
    34: ((3, 4, 6, 3), "basic"),
    50: ((3, 4, 6, 3), "bottleneck"),
    101: ((3, 4, 23, 3), "bottleneck"),
    152: ((3, 8, 36, 3), "bottleneck"),
}


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return the layers stem, stage1.block1, ..., head of the configured ResNet.

    They match `data`'s channels and classes.

    Raises:
        ConfigError: No such network has this version, block, shortcut, norm, width or depth.
    """
    _check(model, tuple(_PREFERENCE), tuple(_CONVS))
    kind = block_of(model)
    num_blocks = (model.depth - 2) // (_NUM_STAGES * _CONVS[kind])
    is_plain = model.version == 1 and kind == "basic"
    stem = {
        "in_channels": data.channels,
        "out_channels": model.width,
        "kernel": 3,
        "stride": 1,
        "norm": model.norm,
    }
    return (
        block("stem", "conv", "chain:ConvUnit", **stem, activate=model.version == 1),
        *_stages(
            model, data, kind, [num_blocks] * _NUM_STAGES, "identity" if is_plain else "projection"
        ),
    )


def imagenet_layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return stem, stage1.block1, ..., head for `data`'s channels and classes.

    Raises:
        ConfigError: No such network has this depth, version, block, shortcut, norm, width or
            dropout.
    """
    if model.depth not in _DEPTHS:
        raise depth_error(model.depth, one_of(map(str, _DEPTHS)), _DEPTHS)
    blocks, kind = _DEPTHS[model.depth]
    _check(model, tuple(_PREFERENCE), (kind,))
    first = conv(64, 7, 2)._replace(activates=model.version == 1)
    stem = Backbone(64, {"stem": (first, max_pool(3, 2, 1))})
    return (
        *stem.layers(data.channels, model.width, model.norm),
        *_stages(model, data, kind, blocks, "projection"),
    )


def block_of(model: ModelConfig) -> str:
    """Return "basic" or "bottleneck".

    `auto` prefers basic for version 1 and bottleneck for version 2.

    Raises:
        ConfigError: The depth matches no allowed block; the error names the nearest depths.
    """
    wanted = _PREFERENCE[model.version] if model.block == "auto" else (model.block,)
    valid: set[int] = set()
    for kind in wanted:
        period = _NUM_STAGES * _CONVS[kind]
        num_blocks, left = divmod(model.depth - 2, period)
        if num_blocks > 0 and not left:
            return kind
        valid |= {period * max(1, num_blocks) + 2, period * (max(1, num_blocks) + 1) + 2}
    formulas = " or ".join(f"{_NUM_STAGES * _CONVS[kind]}n+2 ({kind})" for kind in wanted)
    raise depth_error(
        model.depth, f"a ResNet v{model.version} has depth {formulas}, n >= 1", valid, 3
    )


def _stages(
    model: ModelConfig, data: DataConfig, kind: str, blocks: Sequence[int], shortcut: str
) -> tuple[Layer, ...]:
    """Return the blocks of all stages and the head; the model may override `shortcut`."""
    is_preactivated = model.version == 2
    out = []
    in_channels = model.width
    variance = 1.0
    for stage, num_blocks in enumerate(blocks):
        inner = model.width << stage
        for index in range(num_blocks):
            scales = (1.0, 1.0)
            stride = 2 if stage and not index else 1
            if model.norm == _NORMALIZER_FREE:
                scales = (math.sqrt(variance), _BRANCH_SCALE)
                is_projected = stride > 1 or in_channels != inner * _EXPANSION[kind]
                variance = (1.0 if is_projected else variance) + _BRANCH_SCALE**2
            residual = block(
                f"stage{stage + 1}.block{index + 1}",
                "residual",
                f"residual:{'Pre' if is_preactivated else 'Post'}ActivationBlock",
                channels=(in_channels, inner, inner * _EXPANSION[kind]),
                stride=stride,
                bottleneck=kind == "bottleneck",
                shortcut=shortcut if model.shortcut == "auto" else model.shortcut,
                norm=model.norm,
                num_blocks=sum(blocks),
                scales=scales,
            )
            out.append(residual)
            in_channels = inner * _EXPANSION[kind]
    return (*out, pooled_head(model, data, in_channels, activate=is_preactivated))


def _check(model: ModelConfig, versions: Sequence[int], kinds: Sequence[str]) -> None:
    check_choice("version", model.version, versions)
    check_choice("block", model.block, ("auto", *kinds))
    check_choice("shortcut", model.shortcut, ("auto", "identity", "projection"))
    check_classifier(model, (*NORMS, _NORMALIZER_FREE))
    if model.norm == _NORMALIZER_FREE and model.version != 2:
        raise ConfigError(
            "model.norm", model.norm, "has blocks of version 2", "set model.version=2"
        )
    if model.norm == _NORMALIZER_FREE and model.shortcut == "identity":
        text = "has less variance than model.norm=normalizer_free counts on where the shape changes"
        raise ConfigError("model.shortcut", model.shortcut, text, "set model.shortcut=projection")


# stages 2 and 3, or 2 to 4, each halve the map; the ImageNet stem shrinks the image 4 times
MODELS.register("resnet", ModelFamily(layers, lambda model: 4, title="{name}{depth}-v{version}"))
MODELS.register(
    "resnet_imagenet",
    ModelFamily(imagenet_layers, lambda model: 32, title="{name}{depth}-v{version}"),
)

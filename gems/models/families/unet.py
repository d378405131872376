"""U-Net (Ronneberger et al. 2015, arXiv 1505.04597) as named layers.

It has `model.depth` levels. On the way down, each level has two 3x3 convolutions; a 2x2 max pooling
leads to the next level, which has twice the channels, starting from `model.width`. On the way up,
each level has a 2x2 up-convolution, concatenated with the skip of that level, and two 3x3
convolutions. The published network has depth 5, width 64 and no norm. Convolutions are padded here,
so the map of the logits has the size of the image, and sides may be any number of pixels. For
data.task=segmentation the head returns that map, otherwise the mean of the pixels' logits.

A skip is passed by name through the layers between, as the same tensor; if it crosses a stage
boundary, it is sent on.
"""

from __future__ import annotations

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig, ModelConfig
from gems.data import task_of
from gems.errors import ConfigError
from gems.models.families.shared import check_classifier
from gems.models.layer import MODELS, Layer, ModelFamily, block
from gems.models.steps import chain_layer, conv

_MIN_LEVELS = 2
_MAX_LEVELS = 12


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return the layers of a U-Net, from the image to the head.

    They are down1.conv1, down1.conv2, down1.pool, ..., bottom.conv1, bottom.conv2, up1.widen,
    up1.conv1, ..., head. Level 1 is the level of the image; up1 comes last.

    Raises:
        ConfigError: The depth, norm or width is invalid.
    """
    check_classifier(model)
    _check_levels(model)
    channels = [model.width << level for level in range(model.depth)]
    skips: tuple[str, ...] = ()
    out: list[Layer] = []
    last = data.channels
    for level in range(model.depth - 1):
        out += _double(f"down{level + 1}", last, channels[level], model.norm, skips)
        skips = (*skips, f"skip{level + 1}")
        out.append(block(f"down{level + 1}.pool", "pool", "skips:Descend", names=skips))
        last = channels[level]
    out += _double("bottom", last, channels[-1], model.norm, skips)
    for level in reversed(range(model.depth - 1)):
        skips = skips[:-1]
        wide = channels[level]
        widen = {"in_channels": 2 * wide, "out_channels": wide, "names": skips}
        out.append(block(f"up{level + 1}.widen", "conv", "skips:Ascend", **widen))
        out += _double(f"up{level + 1}", 2 * wide, wide, model.norm, skips)
    target = "skips:DenseHead" if task_of(data) == "segmentation" else "skips:PixelHead"
    head = block("head", "head", target, in_channels=model.width, num_classes=data.num_classes)
    return (*out, head)


def stride_px(model: ModelConfig) -> int:
    """Return the stride of the lowest level, 2^(levels - 1).

    Raises:
        ConfigError: The depth is invalid.
    """
    _check_levels(model)
    return 1 << (model.depth - 1)


def _check_levels(model: ModelConfig) -> None:
    if not _MIN_LEVELS <= model.depth <= _MAX_LEVELS:
        text = f"a U-Net has {_MIN_LEVELS} to {_MAX_LEVELS} levels"
        raise ConfigError("model.depth", model.depth, text, "published: 5")


def _double(
    name: str, in_channels: int, out_channels: int, norm: str, skips: tuple[str, ...]
) -> tuple[Layer, Layer]:
    step = (conv(out_channels, 3),)
    return (
        chain_layer(f"{name}.conv1", "conv", in_channels, step, norm, skips),
        chain_layer(f"{name}.conv2", "conv", out_channels, step, norm, skips),
    )


MODELS.register("unet", ModelFamily(layers, stride_px, tasks=TASKS, title="{name}{depth}"))

"""The simplified U-Net of torchgpipe's benchmarks, in the parts at which torchgpipe cuts it.

It has `model.depth` levels on the way down, a bottleneck, and as many on the way up. A block has
`model.convs` 3x3 convolutions without bias, each followed by dropout of channels (`model.dropout`;
0.1 there), instance norm and leaky ReLU; `model.norm` is none. The first level has `model.width`
channels, the next one twice as many. On the way up the map is upsampled by 2 and concatenated with the skip, and a
block has half the channels of its level. A 1x1 convolution gives the logits of each pixel.

Every module is a layer, so the layers count as the children of torchgpipe's sequential network. A
U-Net (B, C) of its tables has five levels, B convolutions a block and C channels.

Source: the network's description in torchgpipe 0.0.7, benchmarks/models/unet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig, ModelConfig
from gems.data import task_of
from gems.errors import ConfigError
from gems.models.families.shared import check_classifier
from gems.models.layer import MODELS, Layer, ModelFamily, block

_MAX_LEVELS = 12
_PARTS = ("conv", "dropout", "norm", "activation")


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return the layers, from the image to the head.

    They are down1.conv1, down1.dropout1, down1.norm1, down1.activation1, ..., down1.skip,
    down1.pool, ..., bottom.conv1, ..., up1.widen, up1.join, up1.conv1, ..., head.

    Raises:
        ConfigError: The depth, width, norm or dropout is invalid.
    """
    check_classifier(model, norms=("none",))
    stride_px(model)
    width = model.width
    skips: tuple[str, ...] = ()
    out: list[Layer] = []
    last = data.channels
    for level in range(model.depth):
        channels = width << level
        out += _block(model, f"down{level + 1}", (last, channels, channels), skips)
        skips = (*skips, f"skip{level + 1}")
        out.append(_part(f"down{level + 1}.skip", "Keep", skips))
        out.append(_part(f"down{level + 1}.pool", "Halve", skips))
        last = channels
    out += _block(model, "bottom", (last, 2 * last, last), skips)
    for level in reversed(range(model.depth)):
        out.append(_part(f"up{level + 1}.widen", "Double", skips))
        skips = skips[:-1]
        out.append(_part(f"up{level + 1}.join", "Attach", skips))
        half = (width << level) // 2
        out += _block(model, f"up{level + 1}", (4 * half, half, half), skips)
    target = "skips:DenseHead" if task_of(data) == "segmentation" else "skips:PixelHead"
    head = block("head", "head", target, in_channels=width // 2, num_classes=data.num_classes)
    return (*out, head)


def stride_px(model: ModelConfig) -> int:
    """Return the stride of the bottleneck, 2^levels.

    Raises:
        ConfigError: The depth or width is invalid.
    """
    if not 1 <= model.depth <= _MAX_LEVELS:
        text = f"a simplified U-Net has 1 to {_MAX_LEVELS} levels"
        raise ConfigError("model.depth", model.depth, text, "torchgpipe's have 5")
    if model.width % 2:
        text = "the last block of a simplified U-Net has half the channels of the first"
        raise ConfigError("model.width", model.width, text, f"set {model.width + 1}")
    return 1 << model.depth


def _block(
    model: ModelConfig, name: str, channels: tuple[int, int, int], skips: Sequence[str]
) -> Iterator[Layer]:
    given, inner, last = channels
    for number in range(1, model.convs + 1):
        made = last if number == model.convs else inner
        options: dict[str, dict[str, float]] = {
            "conv": {"in_channels": given, "out_channels": made},
            "dropout": {"rate": model.dropout},
            "norm": {"channels": made},
        }
        for part in _PARTS:
            target = {"conv": "Conv3x3", "activation": "Leaky"}.get(part, part.capitalize())
            yield _part(f"{name}.{part}{number}", target, skips, **options.get(part, {}))
        given = made


def _part(name: str, target: str, skips: Sequence[str], **options: float) -> Layer:
    kind = {"Conv3x3": "conv", "Halve": "pool"}.get(target, target.lower())
    return block(name, kind, f"unet_parts:{target}", carried=tuple(skips), **options)


MODELS.register(
    "unet_simplified", ModelFamily(layers, stride_px, tasks=TASKS, title="{name}{depth}")
)

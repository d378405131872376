"""CIFAR-style residual networks of any depth as named layers.

Version 1 is He et al. 2015 (arXiv 1512.03385, section 4.2), version 2 the pre-activation form of He et al.
2016 (arXiv 1603.05027): a 3x3 stem, three stages of n residual blocks whose feature maps halve at stages 2
and 3, and a head of global average pooling and one linear map. A basic block has two 3x3 convolutions, so
depth = 6n + 2; a bottleneck block has 1x1, 3x3 and 1x1 to four times its width, so depth = 9n + 2.
"""

from __future__ import annotations

from typing import Any

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError, one_of
from gems.models.families.checks import check_classifier
from gems.models.layer import MODELS, Layer, ModelFamily

_BLOCKS = "gems.models.blocks"
_NUM_STAGES = 3
_CONVS = {"basic": 2, "bottleneck": 3}
_EXPANSION = {"basic": 1, "bottleneck": 4}
_PREFERENCE = {1: ("basic", "bottleneck"), 2: ("bottleneck", "basic")}


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return stem, stage1.block1, ..., head of the configured ResNet for `data`'s channels and classes.

    Raises ConfigError for a version, block, shortcut, norm, width or depth that no such network has.
    """
    _check(model)
    block = block_of(model)
    shortcut = _shortcut_of(model, block)
    num_blocks = (model.depth - 2) // (_NUM_STAGES * _CONVS[block])
    preactivated = model.version == 2
    out = [
        _layer(
            "stem",
            "conv",
            "chain:ConvUnit",
            in_channels=data.channels,
            out_channels=model.width,
            kernel=3,
            stride=1,
            norm=model.norm,
            activate=not preactivated,
        )
    ]
    in_channels = model.width
    for stage in range(_NUM_STAGES):
        inner = model.width << stage
        for index in range(num_blocks):
            out.append(
                _layer(
                    f"stage{stage + 1}.block{index + 1}",
                    "residual",
                    f"residual:{'Pre' if preactivated else 'Post'}ActivationBlock",
                    in_channels=in_channels,
                    inner_channels=inner,
                    out_channels=inner * _EXPANSION[block],
                    stride=2 if stage and not index else 1,
                    bottleneck=block == "bottleneck",
                    shortcut=shortcut,
                    norm=model.norm,
                    num_blocks=_NUM_STAGES * num_blocks,
                )
            )
            in_channels = inner * _EXPANSION[block]
    head = {
        "in_channels": in_channels,
        "num_classes": data.num_classes,
        "norm": model.norm,
        "activate": preactivated,
        "dropout_rate": model.dropout,
    }
    return (*out, _layer("head", "head", "heads:Head", **head))


def stride_px(model: ModelConfig) -> int:
    """Return 4: stages 2 and 3 each halve the feature map, whatever the depth."""
    return 1 << (_NUM_STAGES - 1)


def block_of(model: ModelConfig) -> str:
    """Return "basic" or "bottleneck"; `auto` prefers basic for version 1 and bottleneck for version 2.

    Raises ConfigError, with the nearest depths, when the depth fits no wanted block.
    """
    wanted = _PREFERENCE[model.version] if model.block == "auto" else (model.block,)
    for block in wanted:
        period = _NUM_STAGES * _CONVS[block]
        if model.depth >= period + 2 and (model.depth - 2) % period == 0:
            return block
    formulas = " or ".join(f"{_NUM_STAGES * _CONVS[block]}n+2 ({block})" for block in wanted)
    depths = ", ".join(str(depth) for depth in _nearest_depths(model.depth, wanted))
    raise ConfigError(
        "model.depth", model.depth, f"a ResNet v{model.version} has depth {formulas}, n >= 1", f"nearest: {depths}"
    )


def _nearest_depths(depth: int, blocks: tuple[str, ...]) -> list[int]:
    valid: set[int] = set()
    for block in blocks:
        period = _NUM_STAGES * _CONVS[block]
        below = max(1, (depth - 2) // period)
        valid |= {period * below + 2, period * (below + 1) + 2}
    return sorted(sorted(valid, key=lambda candidate: (abs(candidate - depth), candidate))[:3])


def _shortcut_of(model: ModelConfig, block: str) -> str:
    if model.shortcut != "auto":
        return model.shortcut
    return "identity" if model.version == 1 and block == "basic" else "projection"


def _check(model: ModelConfig) -> None:
    if model.version not in _PREFERENCE:
        raise ConfigError("model.version", model.version, one_of(str(version) for version in _PREFERENCE))
    for key, value, valid in (
        ("model.block", model.block, ("auto", "basic", "bottleneck")),
        ("model.shortcut", model.shortcut, ("auto", "identity", "projection")),
    ):
        if value not in valid:
            raise ConfigError(key, value, one_of(valid))
    check_classifier(model)


def _layer(name: str, kind: str, target: str, **options: Any) -> Layer:
    return Layer(name, kind, f"{_BLOCKS}.{target}", tuple(options.items()))


MODELS.register("resnet", ModelFamily(layers, stride_px, title="{name}{depth}-v{version}"))

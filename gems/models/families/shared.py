"""Parts that families share: checks, a backbone of convolutional layers, and classifiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError, one_of
from gems.models.layer import Layer, ModelFamily, block
from gems.models.steps import (
    Fork,
    Step,
    chain_layer,
    channels_after,
    normed_side,
    scaled,
    scaled_channels,
    stride_after,
)

NORMS = ("batch", "ghost_batch", "frozen_batch", "group", "layer", "none")


@dataclass(frozen=True, slots=True)
class Backbone:
    """The named convolutional layers of a network before the classifier, in order.

    They have the published channels; the first published convolution has `width`.
    """

    width: int
    parts: Mapping[str, tuple[Step, ...]]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all layers."""
        return tuple(step for steps in self.parts.values() for step in steps)

    @property
    def stride_px(self) -> int:
        """The number of source pixels per side that one pixel of the last map covers."""
        return stride_after(self.steps)

    def normed_px(self, side_px: int) -> int:
        """Return the side of the last map that a norm sees, for a side of the image.

        It is 0 if the image is too small.
        """
        return normed_side(side_px, self.steps)

    def channels(self, width: int) -> int:
        """Return the channels of the last map if the first convolution has `width`."""
        return channels_after(0, scaled(self.steps, width, self.width))

    def layers(self, in_channels: int, width: int, norm: str) -> list[Layer]:
        """Return the layers, with channels scaled in proportion to `width`."""
        out = []
        for name, published in self.parts.items():
            steps = scaled(published, width, self.width)
            kind = "inception" if any(isinstance(step, Fork) for step in steps) else "conv"
            out.append(chain_layer(name, kind, in_channels, steps, norm))
            in_channels = channels_after(in_channels, steps)
        return out


Classifier = Callable[[ModelConfig, DataConfig, Backbone], tuple[Layer, ...]]


def chain_family(
    backbone: Callable[[ModelConfig], Backbone],
    classifier: Classifier,
    is_padded: bool = False,
    title: str = "{name}",
) -> ModelFamily:
    """Return the family of a backbone and a classifier.

    If `is_padded`, all layers are padded, so the sizes of the maps are rounded up.
    """

    def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
        check_classifier(model)
        body = backbone(model)
        return (
            *body.layers(data.channels, model.width, model.norm),
            *classifier(model, data, body),
        )

    return ModelFamily(
        layers,
        stride_px=lambda model: backbone(model).stride_px,
        normed_px=None if is_padded else lambda model, side_px: backbone(model).normed_px(side_px),
        title=title,
    )


def fully_connected(map_px: int, hidden: tuple[int, int], dropped: Collection[str]) -> Classifier:
    """Return the classifier of AlexNet, OverFeat and VGG.

    It flattens the map and has two hidden layers and the logits. The last map is averaged to the
    published side `map_px` before it is flattened. `hidden` are the features of fc1 and fc2 at the
    published width. `dropped` are the layers (of fc1, fc2, head) with dropout in front.
    """

    def layers(model: ModelConfig, data: DataConfig, backbone: Backbone) -> tuple[Layer, ...]:
        sizes = (scaled_channels(size, model.width, backbone.width) for size in hidden)
        features = (backbone.channels(model.width) * map_px**2, *sizes, data.num_classes)
        return tuple(
            block(
                name,
                "head" if name == "head" else "linear",
                "heads:FullyConnected",
                in_features=features[index],
                out_features=features[index + 1],
                map_px=0 if index else map_px,
                dropout_rate=model.dropout if name in dropped else 0.0,
                is_last=name == "head",
            )
            for index, name in enumerate(("fc1", "fc2", "head"))
        )

    return layers


def pooled_head(
    model: ModelConfig, data: DataConfig, in_channels: int, target: str = "Head", **changes: Any
) -> Layer:
    """Return the head: global average pooling and one linear map."""
    options = {
        "in_channels": in_channels,
        "num_classes": data.num_classes,
        "norm": model.norm,
        "activate": False,
        "dropout_rate": model.dropout,
    }
    return block("head", "head", f"heads:{target}", **(options | changes))


def check_classifier(
    model: ModelConfig,
    norms: Sequence[str] = NORMS,
    has_auxiliary: bool = False,
    has_stochastic_depth: bool = False,
) -> None:
    """Raise ConfigError for an invalid norm, width or dropout, or for options that do not apply."""
    check_choice("norm", model.norm, norms)
    if model.width < 1:
        raise ConfigError(
            "model.width", model.width, "the filters of the first convolution, at least 1"
        )
    if not 0 <= model.dropout < 1:
        raise ConfigError(
            "model.dropout", model.dropout, "a share of values to drop: 0 or more, below 1"
        )
    if not 0 <= model.stochastic_depth < 1:
        raise ConfigError(
            "model.stochastic_depth",
            model.stochastic_depth,
            "a share of samples: 0 or more, below 1",
        )
    if model.stochastic_depth and not has_stochastic_depth:
        text = f"{model.name} has no stochastic depth here"
        advice = "set model.stochastic_depth=0 or model=convnext_tiny"
        raise ConfigError("model.stochastic_depth", model.stochastic_depth, text, advice)
    if model.auxiliary and not has_auxiliary:
        text = f"{model.name} has no auxiliary classifier here"
        raise ConfigError(
            "model.auxiliary", True, text, "set model.auxiliary=false or model=inception_v3"
        )


def check_choice(key: str, value: object, valid: Collection[object]) -> None:
    """Raise ConfigError if a value of model.`key` is not among the valid ones."""
    if value not in valid:
        raise ConfigError(f"model.{key}", value, one_of(map(str, valid)))


def depth_error(depth: int, text: str, candidates: Collection[int], count: int = 2) -> ConfigError:
    """Return the error for a depth without a network; it names the nearest candidates."""
    near = sorted(candidates, key=lambda other: (abs(other - depth), other))[:count]
    return ConfigError("model.depth", depth, text, f"nearest: {', '.join(map(str, sorted(near)))}")

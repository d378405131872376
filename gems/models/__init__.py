"""The model families of the zoo, by name.

A family is a function from a configuration to named layers. This package does not import torch.
"""

from __future__ import annotations

import math
from itertools import count

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models.imported import describe as imported
from gems.models.layer import MODELS, Layer, ModelFamily

__all__ = [
    "MODELS",
    "Layer",
    "ModelFamily",
    "check_image",
    "layers_of",
    "num_outputs",
    "stride_of",
    "takes_of",
    "tasks_of",
    "title_of",
]


_IMPORTED = ModelFamily(imported.layers, tasks=TASKS)


def _family(model: ModelConfig) -> ModelFamily:
    return _IMPORTED if model.target is not None else MODELS[model.name]


def layers_of(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return the layers of the configured network, in order.

    Raises:
        ConfigError: `model.name` is unknown, the family refuses the configuration (a depth, a
            block, ...), or a user's own network cannot be divided into layers.
    """
    return _family(model).layers(model, data)


def num_outputs(model: ModelConfig, data: DataConfig) -> int:
    """Return the number of tensors in the network's output; it is 1 for networks of the zoo.

    Raises:
        ConfigError: As in `layers_of`.
    """
    return 1 if model.target is None else imported.num_outputs(model, data)


def takes_of(model: ModelConfig) -> str:
    """Return the kind of input of the first layer: images, tokens or token_pairs.

    A user's own network takes images.
    """
    return _family(model).takes


def tasks_of(model: ModelConfig) -> tuple[str, ...]:
    """Return the tasks for which the network may be trained."""
    return _family(model).tasks


def stride_of(model: ModelConfig) -> int:
    """Return the total stride: the source pixels per side that one pixel of the last map covers.

    It is 1 for a user's own network.
    """
    return _family(model).stride_px(model)


def title_of(model: ModelConfig) -> str:
    """Return the name of a resolved model for tables.

    It consists of the family and the fields that distinguish its networks, or it is the name of the
    user's class.
    """
    return _family(model).title.format(name=model.name, depth=model.depth, version=model.version)


def check_image(model: ModelConfig, data: DataConfig, micro_batch_size: int | None = None) -> None:
    """Raise ConfigError if a side of the image is smaller than the network accepts.

    With `micro_batch_size`, also raise it if batch norm would see a single value per channel in the
    last feature map, because the variance of one value does not exist. A user's own network is run
    on the image without computing. Models that do not read images pass.
    """
    if takes_of(model) != "images":
        return
    if model.target is not None:
        imported.check_batch(model, data, micro_batch_size)
        return
    if data.depth_px is not None:
        text = f"is for volumes, and model={model.name} takes images"
        raise ConfigError(
            "data.depth_px",
            data.depth_px,
            text,
            "leave it out, or give a network of your own: model.target=package.module.Class",
        )
    last_px = 1
    for name, side_px in data.sides.items():
        key = f"data.{name}"
        normed_px = _normed_px(model, side_px)
        if not normed_px:
            least_px = _least_side(model, 1)
            text = (
                f"{model.name} shrinks an image {stride_of(model)} times, so a side has at least"
                f" {least_px} px"
            )
            raise ConfigError(key, side_px, text, f"set {key}={least_px} or more")
        last_px *= normed_px
    if model.norm == "batch" and micro_batch_size is not None and micro_batch_size * last_px == 1:
        text = (
            f"an image of {data.height_px}x{data.width_px} px leaves batch norm one value a"
            " channel, too few"
        )
        least_px = _least_side(model, 2)
        advice = (
            f"set data.height_px={least_px} or more, parallel.micro_batch_size=2 or"
            " model.norm=group"
        )
        raise ConfigError("data.height_px", data.height_px, text, advice)


def _normed_px(model: ModelConfig, side_px: int) -> int:
    normed_px = MODELS[model.name].normed_px
    stride_px = stride_of(model)
    if normed_px is not None:
        return normed_px(model, side_px)
    return math.ceil(side_px / stride_px) if side_px >= stride_px else 0


def _least_side(model: ModelConfig, map_px: int) -> int:
    """Return the smallest image side, in pixels, whose last normed map has `map_px` a side."""
    return next(side_px for side_px in count(1) if _normed_px(model, side_px) >= map_px)

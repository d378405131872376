"""The zoo: model families by name, each a function from a configuration to named layers (no torch here)."""

from __future__ import annotations

import math

from gems.config import DataConfig, ModelConfig
from gems.errors import ConfigError, nearest, one_of
from gems.models import resnet
from gems.models.layer import Family, Layer

__all__ = ["FAMILIES", "Family", "Layer", "check_image", "layers_of", "register", "stride_of"]

FAMILIES: dict[str, Family] = {}


def register(name: str, family: Family) -> None:
    """Adds a family under `name`; raises ValueError when the name is taken by another one."""
    if FAMILIES.setdefault(name, family) is not family:
        raise ValueError(f"a model family named {name!r} is registered already")


def layers_of(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Gives the layers of the configured network, first to last.

    Raises ConfigError for an unknown `model.name` and for whatever the family refuses (a depth, a block,
    ...).
    """
    return _family(model).layers(model, data)


def stride_of(model: ModelConfig) -> int:
    """Gives how many source pixels a side one pixel of the network's last feature map stands for."""
    return _family(model).stride_px(model)


def check_image(model: ModelConfig, data: DataConfig, micro_batch_size: int | None = None) -> None:
    """Raises ConfigError when a side of the image is smaller than the network's stride.

    With `micro_batch_size` also when batch norm would see a single value a channel in the last feature map,
    whose variance does not exist.
    """
    stride_px = stride_of(model)
    for key, side_px in (("data.height_px", data.height_px), ("data.width_px", data.width_px)):
        if side_px < stride_px:
            raise ConfigError(
                key,
                side_px,
                f"{model.name} shrinks an image {stride_px} times, so a side has at least {stride_px} px",
                f"set {key}={stride_px} or more",
            )
    last_px = math.ceil(data.height_px / stride_px) * math.ceil(data.width_px / stride_px)
    if model.norm == "batch" and micro_batch_size is not None and micro_batch_size * last_px == 1:
        raise ConfigError(
            "data.height_px",
            data.height_px,
            f"an image of {data.height_px}x{data.width_px} px leaves batch norm one value a channel, too few",
            f"set data.height_px={stride_px + 1} or more, parallel.micro_batch_size=2 or model.norm=group",
        )


def _family(model: ModelConfig) -> Family:
    if model.name not in FAMILIES:
        raise ConfigError(
            "model.name",
            model.name,
            one_of(sorted(FAMILIES)),
            f"nearest: {', '.join(nearest(model.name, FAMILIES))}",
        )
    return FAMILIES[model.name]


register("resnet", Family(layers=resnet.layers, stride_px=resnet.stride_px))

"""A named layer as plain data: what a model is made of before any weight exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gems.config import DataConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    """The smallest unit that may be placed on a rank.

    `target` names the module class as "package.module:ClassName" and `options` its keyword arguments, so that
    counting, cutting and hashing a model needs no torch. `kind` is a word for tables ("conv", "residual",
    "head").
    """

    name: str
    kind: str
    target: str
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A way to turn a configuration into layers.

    `layers` raises ConfigError for a network that does not exist; `stride_px` gives the total down-sampling.
    """

    layers: Callable[[ModelConfig, DataConfig], tuple[Layer, ...]]
    stride_px: Callable[[ModelConfig], int]

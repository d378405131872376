"""A named layer as plain data: what a model is made of before any weight exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gems.config import registries
from gems.config.schema import DataConfig, ModelConfig
from gems.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Layer:
    """The smallest unit that may be placed on a rank.

    `target` names the module class as "package.module:ClassName" and `options` its keyword
    arguments, so that counting, cutting and hashing a model needs no torch. `kind` is a word for
    tables ("conv", "residual", "head"). Layers that are parts of one whole (`is_part`) have the
    values of a whole that is drawn at once.
    """

    name: str
    kind: str
    target: str
    options: tuple[tuple[str, Any], ...]
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A way to turn a configuration into layers.

    `layers` raises ConfigError for a network that does not exist; `stride_px` gives the total
    down-sampling, 1 if there is no image to shrink. `normed_px` gives, for a side of the image, the
    side of the smallest map that a norm sees, and 0 for an image too small; without it that is the
    side over the stride, rounded up, from one stride on. `takes` says what the first layer reads,
    by the kinds of `gems.data`: images, tokens or token_pairs; `tasks`, for what its output is a
    score. `title` is the model's name in tables, with the fields of the configuration that tell one
    network of the family from another.
    """

    layers: Callable[[ModelConfig, DataConfig], tuple[Layer, ...]]
    stride_px: Callable[[ModelConfig], int] = lambda model: 1
    normed_px: Callable[[ModelConfig, int], int] | None = None
    takes: str = "images"
    tasks: tuple[str, ...] = ("classification", "multi_label", "regression")
    title: str = "{name}"


def block(name: str, kind: str, target: str, **options: Any) -> Layer:
    """Return a layer of `gems.models.blocks`, of which `target` names "file:Class"."""
    return Layer(name, kind, f"gems.models.blocks.{target}", tuple(options.items()))


MODELS: Registry[ModelFamily] = registries.MODELS

"""A named layer as plain data: the description of a model before any weight exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gems.config import registries
from gems.config.schema import DataConfig, ModelConfig
from gems.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Layer:
    """The smallest unit that can be placed on a rank.

    `target` names the module class as "package.module:ClassName" and `options` its keyword
    arguments, so a model can be counted, partitioned and hashed without torch. `kind` is a word for
    tables ("conv", "residual", "head"). Layers that are parts of one whole (`is_part`) have the
    parameters of a network that is initialized as a whole.
    """

    name: str
    kind: str
    target: str
    options: tuple[tuple[str, Any], ...]
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A function from a configuration to layers, with the properties of its networks.

    `layers` raises ConfigError if no such network exists. `stride_px` returns the total
    down-sampling, or 1 if there is no image to shrink. `normed_px` maps a side of the image to the
    side of the smallest map that a norm sees, and returns 0 if the image is too small. Without it,
    that side is the image's side divided by the stride, rounded up, and an image has at least one
    stride. `takes` is the kind of input by the kinds of `gems.data`: images, tokens or token_pairs.
    `tasks` are the tasks for which its output is a score. `title` is the model's name in tables,
    with the configuration fields that distinguish the networks of the family.
    """

    layers: Callable[[ModelConfig, DataConfig], tuple[Layer, ...]]
    stride_px: Callable[[ModelConfig], int] = lambda model: 1
    normed_px: Callable[[ModelConfig, int], int] | None = None
    takes: str = "images"
    tasks: tuple[str, ...] = ("classification", "multi_label", "regression")
    title: str = "{name}"


def block(name: str, kind: str, target: str, **options: Any) -> Layer:
    """Return a layer of `gems.models.blocks`; `target` is "file:Class"."""
    return Layer(name, kind, f"gems.models.blocks.{target}", tuple(options.items()))


MODELS: Registry[ModelFamily] = registries.MODELS

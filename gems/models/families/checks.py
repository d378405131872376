"""Checks that the families of image classifiers share."""

from __future__ import annotations

from gems.config.schema import ModelConfig
from gems.errors import ConfigError, one_of

NORMS = ("batch", "group", "none")


def check_classifier(model: ModelConfig, has_auxiliary: bool = False) -> None:
    """Raise ConfigError for a norm, width or dropout that no classifier has, and for a head that this one lacks."""
    if model.norm not in NORMS:
        raise ConfigError("model.norm", model.norm, one_of(NORMS))
    if model.width < 1:
        raise ConfigError("model.width", model.width, "the filters of the first convolution, at least 1")
    if not 0 <= model.dropout < 1:
        raise ConfigError("model.dropout", model.dropout, "a share of values to drop: 0 or more, below 1")
    if model.auxiliary and not has_auxiliary:
        raise ConfigError(
            "model.auxiliary",
            model.auxiliary,
            f"{model.name} has no auxiliary classifier here",
            "set model.auxiliary=false or model=inception_v3",
        )


def check_depth(model: ModelConfig, depths: tuple[int, ...]) -> None:
    """Raise ConfigError, with the nearest depths, when the family has no network of `model.depth`."""
    if model.depth not in depths:
        nearest = sorted(depths, key=lambda depth: (abs(depth - model.depth), depth))[:2]
        raise ConfigError(
            "model.depth",
            model.depth,
            one_of(str(depth) for depth in depths),
            f"nearest: {', '.join(str(depth) for depth in sorted(nearest))}",
        )

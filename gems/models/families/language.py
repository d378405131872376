"""What the models of language share: they read tokens, which have no pixels, and tell words of a vocabulary apart."""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError


def check_language(model: ModelConfig, data: DataConfig) -> None:
    """Raise ConfigError for a width below 1, or a vocabulary smaller than that of the data."""
    if model.width < 1:
        raise ConfigError("model.width", model.width, "the size of the hidden states, at least 1")
    if model.vocabulary < data.num_classes:
        raise ConfigError(
            "model.vocabulary",
            model.vocabulary,
            f"must be data.num_classes={data.num_classes} or more: the data has so many tokens",
            f"set model.vocabulary={data.num_classes}, or fewer data.num_classes",
        )


def stride_px(model: ModelConfig) -> int:
    """Return 1: there is no image to shrink."""
    return 1

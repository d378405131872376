"""What the tests of a user's own networks share: where those are, and the images that they get."""

from __future__ import annotations

from pathlib import Path

from gems.config.schema import DataConfig, ModelConfig
from gems.models.imported.describe import resolve_target

ROOT = Path(__file__).parents[2]
DATA = DataConfig(height_px=9, width_px=10)
NETS = "tests.helpers.own_nets"
UNET = "tests.helpers.own_unet:OwnUNet"


def own(target: str, **kwargs: object) -> ModelConfig:
    """Return the resolved configuration of a user's network."""
    return resolve_target(ModelConfig(target=target, kwargs=kwargs))

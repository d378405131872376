"""Sources of small images in files, inspected and opened as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gems.config.schema import DataConfig
from gems.data import open_dataset
from gems.data.inspection import inspect_data
from gems.errors import ConfigError

SIDE = 8


def data_of(name: str, path: Path | str, **changes: Any) -> DataConfig:
    """Images of 8 x 8 pixels that are not augmented, unless changed."""
    sides = {"height_px": SIDE, "width_px": SIDE, "augment": False}
    return DataConfig(**{"name": name, "path": str(path), **sides, **changes})


def opened(name: str, path: Path | str, **changes: Any) -> Any:
    inspect_data(data_of(name, path, **changes), 0)
    return open_dataset(data_of(name, path, **changes), 0)


def refused(name: str, path: Path | str, **changes: Any) -> str:
    """Return the error, which is one line."""
    with pytest.raises(ConfigError) as caught:
        opened(name, path, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save(path: Path, pixels: np.ndarray, **kwargs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path, **kwargs)
    return path

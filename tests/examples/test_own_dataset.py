"""The example of a data set: registered by one decorator, it is read as the toolkit's own are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gems.config.schema import DataConfig
from gems.data import open_dataset
from gems.data.dataset import DATASETS
from gems.errors import ConfigError


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the example, for these tests alone: others count what is registered."""
    importlib.import_module("examples.own_dataset")
    yield
    DATASETS.entries.pop("npy")
    sys.modules.pop("examples.own_dataset")


def test_tiles_are_read(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(256, size=(8, 3, 16, 16), dtype=np.uint8)
    labels = np.arange(8) % 2
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    data = DataConfig(name="npy", path=str(tmp_path), height_px=16, width_px=16, augment=False)
    found = open_dataset(data, seed=0)
    assert (found.num_train, found.num_validation) == (6, 2)
    np.testing.assert_array_equal(
        found.image("train", 3), (images[3].astype(np.float32) - 127.5) / 64.0
    )
    assert [found.label("validation", index) for index in range(2)] == labels[6:].tolist()
    with pytest.raises(ConfigError, match="has tiles of"):
        open_dataset(DataConfig(name="npy", path=str(tmp_path), height_px=32, width_px=32), seed=0)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a folder with images\.npy"):
        open_dataset(DataConfig(name="npy", path=str(tmp_path), height_px=16, width_px=16), seed=0)

"""The example of a data set: a folder of tiles that data=folder reads."""

from __future__ import annotations

from pathlib import Path

from examples.make_tiles import TILE_PX, main
from gems.config.compose import compose
from gems.data import open_dataset


def test_tiles_are_read(tmp_path: Path) -> None:
    main(tmp_path)
    spec = compose(
        [
            "data=folder",
            f"data.path={tmp_path}",
            f"data.height_px={TILE_PX}",
            f"data.width_px={TILE_PX}",
        ]
    )
    dataset = open_dataset(spec.data, seed=0)
    assert dataset.image("train", 0).shape == (3, TILE_PX, TILE_PX)
    for split in ("train", "validation"):
        assert min(dataset.class_counts(split)) > 3

"""Maps of classes that are written part by part, and what is held of them meanwhile."""

from __future__ import annotations

import csv
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.engine.batch_loader import BatchLoader
from gems.engine.evaluation.map_file import TILE_PX, MapFile
from gems.engine.evaluation.predictions import Numbered, write_predictions
from gems.engine.rank import Rank
from gems.engine.transport.mpi import world
from gems.streaming.axis_rules import even_ends
from gems.streaming.strip_stage import StripStage
from tests.helpers.toys import make_spec, plan_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sides", "grid", "num_classes"),
    [((600, 530), (7, 1), 3), ((513, 300), (4, 3), 300), ((5, 260, 270), (2, 3, 2), 4)],
)
def test_parts_in_any_order_make_the_file_of_the_whole(
    tmp_path: Path, sides: tuple[int, ...], grid: tuple[int, ...], num_classes: int
) -> None:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, num_classes, sides)
    spans = [list(pairwise((0, *even_ends(*axis)))) for axis in zip(sides, grid, strict=True)]
    boxes = list(product(*spans))
    rng.shuffle(boxes)
    file = MapFile(tmp_path / "a/map.tif", sides, num_classes)
    for box in boxes:
        assert not file.is_complete
        box = tuple((int(begin), int(end)) for begin, end in box)
        file.add(classes[tuple(slice(*span) for span in box)], box[: 1 if grid[1] == 1 else None])
    assert file.is_complete
    np.testing.assert_array_equal(file.counts, np.bincount(classes.ravel(), minlength=num_classes))
    file.write()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["map.tif"]
    with tifffile.TiffFile(tmp_path / "a/map.tif") as read:
        np.testing.assert_array_equal(read.asarray(), classes)
        assert len(read.pages) == (sides[0] if len(sides) == 3 else 1)
        assert read.pages[0].tile == (TILE_PX, TILE_PX)
        assert read.pages[0].dtype == (np.uint8 if num_classes <= 256 else np.uint16)


def test_only_tiles_that_miss_pixels_are_held(tmp_path: Path) -> None:
    file = MapFile(tmp_path / "map.tif", (8 * TILE_PX, 4 * TILE_PX), 2)
    for first in range(0, 8 * TILE_PX, 100):
        end = min(first + 100, 8 * TILE_PX)
        file.add(np.zeros((end - first, 4 * TILE_PX), np.int64), ((first, end),))
        assert len(file._open) <= 4
    assert file.is_complete and not file._open
    file.write()


def spec_of(strips: int | list[int]) -> RunSpec:
    data = DataConfig(
        name="synthetic",
        task="segmentation",
        num_classes=2,
        height_px=24,
        width_px=16,
        train_samples=8,
        validation_samples=5,
    )
    model = ModelConfig(name="unet", depth=2, width=4, norm="none")
    return make_spec("1f1b", 1, model=model, data=data, parallel__strips=strips)


def test_predictions_by_strip_are_those_of_whole_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    for strips in (1, 3, [2, 2]):
        if strips != 1:
            monkeypatch.setattr(StripStage, "joined", None)  # of the outputs of a whole image
        out = tmp_path / str(strips)
        out.mkdir()
        rank = Rank.open(plan_of(spec_of(strips)), world(), CPU, trains=False)
        loader = BatchLoader.open(rank.plan, rank.comm, CPU, 99, view=Numbered)
        write_predictions(rank, loader, {"out": str(out), "classes": ["a", "b"]})
        loader.close()
        rows = list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))
        found.append((rows, [tifffile.imread(out / row["map"]) for row in rows]))
    assert len(found[0][0]) == 5 and {len(np.unique(each)) for each in found[0][1]} == {2}
    for rows, maps in found[1:]:
        assert rows == found[0][0]
        np.testing.assert_array_equal(maps, found[0][1])

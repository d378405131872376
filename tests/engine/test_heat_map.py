"""Heat maps of slides: which regions lie where, and files for slides and classes.

And the slides of --input.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from gems.cli.predict import unlabelled, write_list
from gems.config.schema import DataConfig
from gems.data import open_dataset
from gems.engine.evaluation.heat_map import heat, write_heat_maps
from tests.helpers.toys import make_spec

pytest.importorskip("openslide")
SIDE = 64


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Two slides in two folders of one name, 2 x 3 regions each, as `gems predict --input` gives them."""
    paths = [tmp_path / folder / "s.tif" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        tifffile.imwrite(
            path, np.full((2 * SIDE, 3 * SIDE, 3), 200, np.uint8), tile=(64, 64), photometric="rgb"
        )
    own = DataConfig(
        name="slide",
        path=str(tmp_path / "gone"),
        height_px=SIDE,
        width_px=SIDE,
        level=0,
        tissue_share=0.0,
        class_map={"benign": 0, "tumour": 1},
        image_column="slide",
        num_classes=2,
    )
    listed = tmp_path / "list.csv"
    write_list(listed, paths, own)
    return unlabelled(own, make_spec().seed, listed)


def test_slides_without_labels_are_a_validation_split(data: DataConfig) -> None:
    dataset = open_dataset(data, 0)
    assert (dataset.num_train, dataset.num_validation) == (0, 12)
    assert dataset.image("validation", 3) == pytest.approx((200 - 127.5) / 64)


def test_the_mean_of_the_boxes_that_cover_a_pixel() -> None:
    """Boxes in pixels of level 0, on a map of a tenth of it; one reaches beyond the slide."""
    found = heat(
        (4, 6), 10.0, [(0, 0, 20, 20), (10, 0, 20, 20), (50, 30, 40, 40)], [0.0, 1.0, 0.25]
    )
    expected = np.full((4, 6), np.nan)
    expected[:2, 0], expected[:2, 1], expected[:2, 2], expected[3, 5] = 0.0, 0.5, 1.0, 0.25
    assert np.array_equal(found, expected, equal_nan=True)


def test_a_file_for_each_slide(data: DataConfig, tmp_path: Path) -> None:
    """Of two classes the second: regions turn from blue to red with its probability."""
    dataset = open_dataset(data, 0)
    tumour = np.linspace(0, 1, 12)
    write_heat_maps(
        tmp_path / "out", dataset, np.stack([1 - tumour, tumour], axis=1), ["benign", "tumour"]
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "s_2_tumour.png",
        "s_tumour.png",
    ]
    first, second = (
        np.asarray(Image.open(tmp_path / "out" / name))
        for name in ("s_tumour.png", "s_2_tumour.png")
    )
    assert first.shape == (2 * SIDE, 3 * SIDE, 3)
    red = [
        int(pixels[row, column, 0])
        for pixels in (first, second)
        for row in (9, 99)
        for column in (9, 99, 180)
    ]
    assert red == sorted(red) and red[-1] - red[0] > 50


def test_of_three_classes_a_file_each(data: DataConfig, tmp_path: Path) -> None:
    write_heat_maps(
        tmp_path / "out", open_dataset(data, 0), np.full((12, 3), 1 / 3), ["a", "b", "c/d"]
    )
    assert len(list((tmp_path / "out").glob("*.png"))) == 6

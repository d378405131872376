"""The picture of a segmentation: which samples, and where their masks and predictions are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gems.config.schema import DataConfig
from gems.data import open_dataset
from gems.engine.evaluation.picture import (
    GAP_PX,
    SAMPLES,
    SIDE_PX,
    TITLE_PX,
    Predictions,
    coloured,
    write_picture,
)
from gems.losses.summed import first_tensor


def test_the_first_samples_are_beside_their_masks_and_predictions(tmp_path: Path) -> None:
    data = DataConfig(
        name="synthetic", task="segmentation", num_classes=3, height_px=20, width_px=20
    )
    dataset = open_dataset(data, 0)
    masks = np.stack([np.asarray(dataset.label("validation", index)) for index in range(7)])
    scores = (
        torch.nn.functional.one_hot(torch.from_numpy(masks[:, ::-1].copy()), 3)
        .permute(0, 3, 1, 2)
        .double()
    )
    kept, by_strip = (Predictions(first_tensor, (20, 20)) for _ in range(2))
    for part in (slice(0, 3), slice(3, 6), slice(6, 7)):
        kept.update({"out": scores[part]}, torch.from_numpy(masks[part]))
        for rows in ((0, 7), (7, 7), (7, 20)):
            strip = scores[part][:, :, slice(*rows)]
            by_strip.update_part({"out": strip}, torch.from_numpy(masks[part]), (rows,))
    np.testing.assert_array_equal(by_strip.maps, kept.maps)
    assert len(kept.maps) == SAMPLES and kept.compute() == {}
    write_picture(tmp_path / "predictions.png", dataset, kept.maps)
    with Image.open(tmp_path / "predictions.png") as picture:
        pixels = np.asarray(picture)
    for row in range(SAMPLES):
        top = TITLE_PX + row * (SIDE_PX + GAP_PX)
        tiles = [
            pixels[top : top + SIDE_PX, left : left + SIDE_PX][4::8, 4::8]
            for left in (GAP_PX + column * (SIDE_PX + GAP_PX) for column in range(3))
        ]
        assert np.array_equal(tiles[1], coloured(masks[row])) and np.array_equal(
            tiles[2], coloured(masks[row, ::-1])
        )
        assert tiles[0].std() > 10


def test_a_pixel_that_is_ignored_is_black() -> None:
    shown = coloured(np.array([[-1, 0], [1, 8]]))
    assert (
        shown[0, 0].tolist() == [0, 0, 0]
        and len({tuple(colour) for colour in shown.reshape(-1, 3).tolist()}) == 3
    )


def test_large_images_are_shown_by_rows_and_volumes_by_their_middle_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for depth in (None, 5):
        data = DataConfig(
            name="synthetic", task="segmentation", height_px=600, width_px=32, depth_px=depth
        )
        dataset = open_dataset(data, 0)
        sides = dataset.shape[1:]
        kept = Predictions(first_tensor, sides)
        mask = np.asarray(dataset.label("validation", 1))
        scores = torch.nn.functional.one_hot(torch.from_numpy(mask), 2).movedim(-1, 0)[None]
        kept.update(torch.cat([scores, scores]), torch.from_numpy(mask)[None])
        image = dataset.image("validation", 1)
        image, mask = (image, mask) if depth is None else (image[:, 2], mask[2])
        for name in ("image", "label"):
            monkeypatch.setattr(dataset, name, None)
        write_picture(tmp_path / "p.png", dataset, kept.maps)
        with Image.open(tmp_path / "p.png") as picture:
            pixels = np.asarray(picture)[TITLE_PX + SIDE_PX + GAP_PX :][:SIDE_PX]
        places = [(2 * np.arange(SIDE_PX) + 1) * side // (2 * SIDE_PX) for side in (600, 32)]
        wanted = np.uint8((image - image.min()) / (image.max() - image.min()) * 255)
        tiles = [wanted.transpose(1, 2, 0)[np.ix_(*places)], coloured(mask[np.ix_(*places)])]
        for column, tile in enumerate([*tiles, tiles[1]]):
            left = GAP_PX + column * (SIDE_PX + GAP_PX)
            np.testing.assert_array_equal(pixels[:, left : left + SIDE_PX], tile)

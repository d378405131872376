"""The picture of a segmentation: which samples, and where their masks and predictions are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
    kept = Predictions(first_tensor)
    for part in (slice(0, 3), slice(3, 6), slice(6, 7)):
        kept.update({"out": scores[part]}, torch.from_numpy(masks[part]))
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

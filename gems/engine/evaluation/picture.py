"""A picture of some validation samples of a segmentation: image, mask, prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gems.data import Dataset
from gems.data.dataset import NO_LABEL
from gems.engine.evaluation.metrics import Metric, Scores, Values
from gems.losses.summed import Outputs

SAMPLES = 4
SIDE_PX = 160
GAP_PX = 8
TITLE_PX = 20
TITLES = ("image", "mask", "prediction")
COLOURS = (
    (245, 245, 245),
    (178, 60, 30),
    (30, 100, 180),
    (60, 150, 60),
    (150, 90, 170),
    (220, 160, 30),
    (90, 90, 90),
)
IGNORED = (0, 0, 0)
Pixels = NDArray[np.uint8]


class Predictions(Metric):
    """The predicted classes of the first samples that it is given."""

    def __init__(self, scores: Scores) -> None:
        super().__init__(scores=scores)
        self.maps: list[Tensor] = []

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep the classes of samples while fewer than SAMPLES are kept."""
        wanted = SAMPLES - len(self.maps)
        if wanted > 0:
            self.maps += list(self._scores(outputs)[:wanted].argmax(1).cpu())

    def compute(self) -> Values:
        """Return no figure."""
        return {}


def write_picture(path: Path, dataset: Dataset, maps: list[Tensor]) -> None:
    """Write rows of image, mask and prediction for the first validation samples, by `maps`.

    Of volumes, the middle planes.
    """
    from PIL import Image, ImageDraw

    columns = len(TITLES)
    size = (GAP_PX + columns * (SIDE_PX + GAP_PX), TITLE_PX + len(maps) * (SIDE_PX + GAP_PX))
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    for column, title in enumerate(TITLES):
        pen.text((GAP_PX + column * (SIDE_PX + GAP_PX), 4), title, fill="black")
    middle: Any = tuple(side // 2 for side in dataset.shape[1:-2])
    for row, predicted in enumerate(maps):
        image, mask = dataset.sample("validation", row)
        for column, pixels in enumerate(
            (
                _shown(np.asarray(image, np.float32)[(slice(None), *middle)]),
                coloured(np.asarray(mask)[middle]),
                coloured(predicted.numpy()[middle]),
            )
        ):
            tile = Image.fromarray(pixels).resize((SIDE_PX, SIDE_PX), Image.Resampling.NEAREST)
            picture.paste(
                tile, (GAP_PX + column * (SIDE_PX + GAP_PX), TITLE_PX + row * (SIDE_PX + GAP_PX))
            )
    picture.save(path)


def coloured(classes: NDArray[np.int64]) -> Pixels:
    """Return a map of classes (H, W) in colours, (H, W, 3); what is ignored is black."""
    table = np.array([*COLOURS, IGNORED], dtype=np.uint8)
    shown: Pixels = table[np.where(classes == NO_LABEL, len(COLOURS), classes % len(COLOURS))]
    return shown


def _shown(image: NDArray[np.float32]) -> Pixels:
    """Return an image (C, H, W) as bytes (H, W, 3), from its least to its greatest value."""
    three = image[:3] if len(image) >= 3 else np.repeat(image[:1], 3, axis=0)
    least = float(three.min())
    most = float(three.max())
    scaled = (three - least) / max(most - least, 1e-12) * 255
    return np.ascontiguousarray(scaled.transpose(1, 2, 0).astype(np.uint8))

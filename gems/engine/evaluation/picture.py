"""A picture of some validation samples of a segmentation: image, mask, prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gems.data import Dataset
from gems.data.dataset import NO_LABEL
from gems.engine.evaluation.metrics import Metric, Scores, Values
from gems.losses.summed import Outputs
from gems.streaming.block_plan import Box, along_all

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


class Shown:
    """The pixels of a map that the picture shows, taken from its parts; of a volume's middle plane."""

    def __init__(self, sides: Sequence[int], dtype: Any, channels: tuple[int, ...] = ()) -> None:
        *outer, height, width = sides
        self._places = [
            *(np.array([side // 2]) for side in outer),
            *((2 * np.arange(SIDE_PX) + 1) * side // (2 * SIDE_PX) for side in (height, width)),
        ]
        self._sides = tuple(sides)
        self._missing = math.prod(sides)
        self._pixels = np.zeros((*channels, *map(len, self._places)), dtype)

    @property
    def is_complete(self) -> bool:
        """Whether all parts of the map have been added."""
        return not self._missing

    @property
    def pixels(self) -> NDArray[Any]:
        """The pixels, of shape (..., SIDE_PX, SIDE_PX)."""
        outer = self._pixels.shape[: self._pixels.ndim - len(self._sides)]
        return self._pixels.reshape(*outer, SIDE_PX, SIDE_PX)

    def add(self, part: NDArray[Any], box: Box) -> None:
        """Take the pixels of a part, which a box has along all axes or the first ones."""
        spans = along_all(box, self._sides)
        inside = [
            np.flatnonzero((places >= begin) & (places < end))
            for places, (begin, end) in zip(self._places, spans, strict=True)
        ]
        of_part = [
            places[chosen] - begin
            for places, chosen, (begin, _) in zip(self._places, inside, spans, strict=True)
        ]
        target: Any = (..., *np.ix_(*inside))
        source: Any = (..., *np.ix_(*of_part))
        self._pixels[target] = part[source]
        self._missing -= math.prod(end - begin for begin, end in spans)


class Predictions(Metric):
    """The predicted classes of the first samples, as a picture shows them."""

    takes_parts = True

    def __init__(self, scores: Scores, sides: Sequence[int]) -> None:
        super().__init__(scores=scores)
        self._sides = tuple(sides)
        self._open: list[Shown] = []  # of the micro-batch under way
        self.maps: list[NDArray[np.int64]] = []

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep the classes of samples while fewer than SAMPLES are kept."""
        if len(self.maps) < SAMPLES:
            scores = self._scores(outputs)
            self._add(scores, (), tuple(scores.shape[2:]))

    def update_part(self, outputs: Outputs, labels: Tensor, part: Box) -> None:
        """Keep those of a part of the maps; a micro-batch ends before the next one begins."""
        if len(self.maps) < SAMPLES:
            self._add(self._scores(outputs), part, self._sides)

    def compute(self) -> Values:
        """Return no figure."""
        return {}

    def _add(self, scores: Tensor, part: Box, sides: Sequence[int]) -> None:
        classes = scores[: SAMPLES - len(self.maps)].argmax(1).cpu().numpy()
        self._open = self._open or [Shown(sides, np.int64) for _ in classes]
        for shown, of_sample in zip(self._open, classes, strict=True):
            shown.add(of_sample, part)
        if self._open and self._open[0].is_complete:
            self.maps += [shown.pixels for shown in self._open]
            self._open = []


def write_picture(path: Path, dataset: Dataset, maps: Sequence[NDArray[np.int64]]) -> None:
    """Write rows of image, mask and prediction for the first validation samples, by `maps`.

    Of volumes, the middle planes. Images and masks are read by rows if they can be.
    """
    from PIL import Image, ImageDraw

    columns = len(TITLES)
    size = (GAP_PX + columns * (SIDE_PX + GAP_PX), TITLE_PX + len(maps) * (SIDE_PX + GAP_PX))
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    for column, title in enumerate(TITLES):
        pen.text((GAP_PX + column * (SIDE_PX + GAP_PX), 4), title, fill="black")
    for row, predicted in enumerate(maps):
        tiles = (_image(dataset, row), coloured(_mask(dataset, row)), coloured(predicted))
        for column, pixels in enumerate(tiles):
            place = (GAP_PX + column * (SIDE_PX + GAP_PX), TITLE_PX + row * (SIDE_PX + GAP_PX))
            picture.paste(Image.fromarray(pixels), place)
    picture.save(path)


def coloured(classes: NDArray[np.int64]) -> Pixels:
    """Return a map of classes (H, W) in colours, (H, W, 3); what is ignored is black."""
    table = np.array([*COLOURS, IGNORED], dtype=np.uint8)
    shown: Pixels = table[np.where(classes == NO_LABEL, len(COLOURS), classes % len(COLOURS))]
    return shown


def _mask(dataset: Dataset, index: int) -> NDArray[np.int64]:
    shown = Shown(dataset.shape[1:], np.int64)
    for box in _parts(dataset, dataset.reads_mask_rows("validation")):
        shown.add(dataset.mask_rows("validation", index, 0, *box[0], *box[1:]), box)
    return shown.pixels


def _image(dataset: Dataset, index: int) -> Pixels:
    """Return an image as bytes (SIDE_PX, SIDE_PX, 3), from its least to its greatest value."""
    num = min(3, dataset.shape[0])
    shown = Shown(dataset.shape[1:], np.float32, (num,))
    least, most = math.inf, -math.inf
    for box in _parts(dataset, dataset.reads_rows("validation")):
        part = dataset.rows("validation", index, 0, *box[0], *box[1:])[:num]
        shown.add(part, box)
        least, most = min(least, float(part.min())), max(most, float(part.max()))
    scaled = (shown.pixels - least) / max(most - least, 1e-12) * 255
    three = scaled if num == 3 else np.repeat(scaled[:1], 3, axis=0)
    return np.ascontiguousarray(three.transpose(1, 2, 0).astype(np.uint8))


def _parts(dataset: Dataset, reads_rows: bool) -> list[Box]:
    """Return the parts of an image to read one after the other; of a volume, the middle plane."""
    *outer, height, width = dataset.shape[1:]
    plane = [(side // 2, side // 2 + 1) for side in outer]
    if outer or not reads_rows:
        return [(*plane, (0, height), (0, width))]
    return [((box.rows.start, box.rows.stop), (0, width)) for box in dataset.bands()]

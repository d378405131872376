"""Heat maps of slides: the probability of a class for each region, drawn over the thumbnail."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gems.data.pyramid import Bytes, Slide, thumbnail
from gems.data.slide import SlideDataset
from gems.utils.atomic_io import atomic_write, distinct

Box = tuple[float, float, float, float]  # x, y, width and height, in pixels of level 0
_SHARE = 0.5  # of the colour, over the thumbnail
_LOW, _HIGH = (
    np.array([40.0, 90.0, 200.0]),
    np.array([215.0, 40.0, 40.0]),
)  # of probabilities 0 and 1


def write_heat_maps(
    folder: Path, dataset: SlideDataset, probabilities: NDArray[np.float64], classes: Sequence[str]
) -> None:
    """Write a PNG file for each slide of the validation split and each class.

    Of two classes for the second alone.

    Args:
        folder: Where the files are written, named after slide and class.
        dataset: The regions.
        probabilities: Of the samples' classes, of shape (samples, classes).
        classes: The names of the classes.
    """
    slides: dict[Path, tuple[Slide, list[int], list[Box]]] = {}
    for index in range(dataset.num_validation):
        slide, box = dataset.box("validation", index)
        _, samples, boxes = slides.setdefault(slide.path, (slide, [], []))
        samples.append(index)
        boxes.append(box)
    shown = range(1, 2) if len(classes) == 2 else range(len(classes))
    folder.mkdir(parents=True, exist_ok=True)
    stems = distinct(path.stem for path in slides)
    for stem, (slide, samples, boxes) in zip(stems, slides.values(), strict=True):
        pixels, scale = thumbnail(slide)
        for number in shown:
            heat_values = heat(
                (pixels.shape[0], pixels.shape[1]),
                scale,
                boxes,
                probabilities[samples, number].tolist(),
            )
            name = f"{stem}_{classes[number]}".replace("/", "_")
            with atomic_write(folder / f"{name}.png") as partial:
                _draw(partial, pixels, heat_values)


def heat(
    shape_px: tuple[int, int], scale: float, boxes: Sequence[Box], values: Sequence[float]
) -> NDArray[np.float64]:
    """Return the mean value of the boxes that cover each pixel, of shape (height, width).

    NaN where none does.

    Args:
        shape_px: Height and width of the map.
        scale: Pixels of level 0 on a side of one of its pixels.
        boxes: x, y, width and height, in pixels of level 0.
        values: One a box.
    """
    total = np.zeros(shape_px)
    count = np.zeros(shape_px)
    for (x, y, width, height), value in zip(boxes, values, strict=True):
        rows = slice(max(0, floor(y / scale)), max(0, ceil((y + height) / scale)))
        columns = slice(max(0, floor(x / scale)), max(0, ceil((x + width) / scale)))
        total[rows, columns] += value
        count[rows, columns] += 1
    heat_values = np.full(shape_px, np.nan)
    np.divide(total, count, out=heat_values, where=count > 0)
    return heat_values


def _draw(path: Path, pixels: Bytes, heat_values: NDArray[np.float64]) -> None:
    from PIL.Image import fromarray

    known = np.isfinite(heat_values)
    colours = _LOW + np.clip(heat_values[known], 0, 1)[:, None] * (_HIGH - _LOW)
    drawn = pixels.copy()
    drawn[known] = np.rint((1 - _SHARE) * drawn[known] + _SHARE * colours).astype(np.uint8)
    fromarray(drawn).save(path, format="PNG")

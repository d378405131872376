"""Rows of images, read without the rest: the same values as in the whole image, and no more memory for more rows."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gems.config.schema import DataConfig
from gems.data import open_dataset, pyramid
from gems.data.dataset import Dataset
from gems.models.streaming.rules import even_ends
from tests.data.test_slide import TILE, library, noise, save_slide, save_table

__all__ = ["library"]
SIDE = 101
SLIDES: list[dict[str, Any]] = [
    {"level": 0},
    {"level": 1},
    {"level": 1, "channels": 1, "normalization": "fixed"},
    {"mpp": 0.7},
    {"level": 0, "region": [667, 409, 101, 101]},
    {"level": 0, "width_px": 60},
]


def slide(path: Path, sides: tuple[int, int] = (511, 769), **changes: Any) -> Dataset:
    """Open a slide whose second level is no whole number of times smaller."""
    height, width = sides
    for number in range(2):
        save_slide(path / f"s{number}.tif", [noise(0, height, width), noise(1, height // 2, width // 2)], mpp=0.5)
    if "region" in changes:
        save_table(path, "s0.tif,0,train", "s1.tif,1,val")
    else:
        save_table(path, "s0.tif,0,train,33,45", "s1.tif,1,val,0,0", columns="file,label,split,x,y")
    fields: dict[str, Any] = {"height_px": SIDE, "width_px": SIDE, "normalization": "imagenet", **changes}
    return open_dataset(DataConfig(name="slide", path=str(path), **fields), 0)


def check_rows(dataset: Dataset, strips: int = 6) -> None:
    """Compare the rows of strips with the whole, as it is and in all the ways that it is turned."""
    ends = even_ends(dataset.shape[1], strips)
    seen = set()
    for split, draws in (("train", range(24)), ("validation", range(1))):
        assert dataset.reads_rows(split)
        for draw in draws:
            whole = dataset.image(split, 0, draw)
            parts = [dataset.rows(split, 0, draw, first, end) for first, end in pairwise((0, *ends))]
            assert all(part.flags.c_contiguous and part.dtype == np.float32 for part in parts)
            np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
            seen.add(whole.tobytes())
    assert len(seen) >= (8 if dataset.shape[1] == dataset.shape[2] else 4)


@pytest.mark.parametrize("changes", SLIDES)
def test_of_slides_are_those_of_the_region(library: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    check_rows(slide(tmp_path, **changes))


@pytest.mark.parametrize("task", ["classification", "multi_label", "segmentation", "regression"])
@pytest.mark.parametrize("width", [SIDE, 40])
def test_of_synthetic_images_are_those_of_the_whole(task: str, width: int) -> None:
    check_rows(open_dataset(DataConfig(name="synthetic", task=task, height_px=SIDE, width_px=width), 0))


def test_of_a_source_that_reads_whole_images_are_cut_out(tmp_path: Path) -> None:
    dataset = slide(tmp_path, transform="torch.nn.Identity")
    assert dataset.reads_rows("validation") and not dataset.reads_rows("train")
    np.testing.assert_array_equal(dataset.rows("train", 0, 0, 20, 31), dataset.image("train", 0)[:, 20:31])


def test_no_pixel_is_read_twice_and_none_is_read_for_nothing(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, asked = slide(tmp_path), []
    real = pyramid._read

    def counted(handle: Any, slide: Any, number: int, corner: Any, size: tuple[int, int]) -> Any:
        asked.append(size[0] * size[1])
        return real(handle, slide, number, corner, size)

    monkeypatch.setattr(pyramid, "_read", counted)
    for draw in range(8):
        asked.clear()
        for first, end in pairwise((0, *even_ends(SIDE, 7))):
            dataset.rows("train", 0, draw, first, end)
        assert sum(asked) == SIDE * SIDE


def peak_bytes(dataset: Dataset, rows: int) -> int:
    """Return the most that reading an image of `rows` rows a strip held at once."""
    dataset.rows("validation", 0, 0, 0, 1)  # opens the file
    tracemalloc.start()
    for first in range(0, dataset.shape[1], rows):
        dataset.rows("validation", 0, 0, first, first + rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_height(library: str, tmp_path: Path) -> None:
    peaks = []
    for height in (2 * TILE[0], 16 * TILE[0]):
        folder = tmp_path / str(height)
        folder.mkdir()
        peaks.append(peak_bytes(slide(folder, (height + 45, 256 + 33), height_px=height, width_px=256), TILE[0] // 2))
    whole = 3 * 16 * TILE[0] * 256 * 4
    assert max(peaks) < 1.1 * min(peaks) + 10_000 and max(peaks) < whole / 8

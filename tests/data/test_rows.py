"""Rows of images, read without the rest.

The same values as in the whole image, and no more memory for more rows.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import PIL.Image
import pytest
import tifffile

from gems.config.schema import DataConfig
from gems.data import open_dataset, pyramid
from gems.data.dataset import Dataset
from gems.data.inspection import inspect_data
from gems.errors import ConfigError
from gems.streaming.axis_rules import even_ends
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
        save_slide(
            path / f"s{number}.tif",
            [noise(0, height, width), noise(1, height // 2, width // 2)],
            mpp=0.5,
        )
    if "region" in changes:
        save_table(path, "s0.tif,0,train", "s1.tif,1,val")
    else:
        save_table(path, "s0.tif,0,train,33,45", "s1.tif,1,val,0,0", columns="file,label,split,x,y")
    fields: dict[str, Any] = {
        "height_px": SIDE,
        "width_px": SIDE,
        "normalization": "imagenet",
        **changes,
    }
    return open_dataset(DataConfig(name="slide", path=str(path), **fields), 0)


def check_rows(dataset: Dataset, strips: int = 6) -> None:
    """Compare the rows of strips with the whole, as it is and in all the ways that it is turned."""
    ends = even_ends(dataset.shape[1], strips)
    seen = set()
    for split, draws in (("train", range(24)), ("validation", range(1))):
        assert dataset.reads_rows(split)
        for draw in draws:
            whole = dataset.image(split, 0, draw)
            parts = [
                dataset.rows(split, 0, draw, first, end) for first, end in pairwise((0, *ends))
            ]
            assert all(part.flags.c_contiguous and part.dtype == np.float32 for part in parts)
            np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
            if dataset.reads_bytes(split):
                check_bytes(dataset, split, draw, whole)
            rows, columns = (ends[1], ends[3]), (3, dataset.shape[2] - 5)
            block = dataset.rows(split, 0, draw, *rows, columns)
            np.testing.assert_array_equal(block, whole[:, slice(*rows), slice(*columns)])
            seen.add(whole.tobytes())
    assert len(seen) >= (8 if dataset.shape[1] == dataset.shape[2] else 4)


@pytest.mark.parametrize("changes", SLIDES)
def test_of_slides_are_those_of_the_region(
    library: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    dataset = slide(tmp_path, **changes)
    assert dataset.reads_bytes("train")
    check_rows(dataset)


@pytest.mark.parametrize("task", ["classification", "multi_label", "segmentation", "regression"])
@pytest.mark.parametrize("width", [SIDE, 40])
def test_of_synthetic_images_are_those_of_the_whole(task: str, width: int) -> None:
    check_rows(
        open_dataset(DataConfig(name="synthetic", task=task, height_px=SIDE, width_px=width), 0)
    )


@pytest.mark.parametrize("width", [12, 7])
def test_of_synthetic_volumes_are_those_of_the_whole(width: int) -> None:
    data = DataConfig(
        name="synthetic", task="segmentation", depth_px=5, height_px=12, width_px=width
    )
    dataset = open_dataset(data, 0)
    seen = set()
    for draw in range(96):
        whole, mask = dataset.sample("train", 1, draw)
        assert whole.shape == (3, 5, 12, width) and np.shape(mask) == (5, 12, width)
        block = dataset.rows("train", 1, draw, 1, 4, (2, 9), (3, 6))
        np.testing.assert_array_equal(block, whole[:, 1:4, 2:9, 3:6])
        np.testing.assert_array_equal(dataset.rows("train", 1, draw, 0, 2), whole[:, :2])
        seen.add(whole.tobytes())
    assert len(seen) == (16 if width == 12 else 8)


def tiffs(folder: Path, values: np.ndarray, options: dict[str, Any], **changes: Any) -> Dataset:
    """Open a folder of TIFF files, a class each, in both splits."""
    height, width = (side for side in values.shape if side > 8)
    for number, place in enumerate(("train/a", "train/b", "validation/a", "validation/b")):
        (folder / place).mkdir(parents=True)
        tifffile.imwrite(
            folder / place / "x.tif", values + np.asarray(number, values.dtype), **options
        )
    fields: dict[str, Any] = {
        "height_px": height,
        "width_px": width,
        "num_classes": 2,
        "normalization": "fixed",
    }
    return open_dataset(DataConfig(name="folder", path=str(folder), **fields | changes), 0)


RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 250, (101, 101, 3), dtype=np.uint8)
GREY = RANDOM.integers(0, 250, (101, 60), np.uint8)
BANDS = RANDOM.integers(0, 4000, (5, 101, 60), dtype=np.uint16)
TILES = {"tile": (16, 32), "photometric": "rgb"}
FILES: list[tuple[np.ndarray, dict[str, Any], dict[str, Any]]] = [
    (COLOUR, TILES, {}),
    (COLOUR, TILES | {"compression": "zlib", "predictor": True}, {}),
    (COLOUR, TILES | {"compression": "lzw"}, {"normalization": "computed"}),
    (COLOUR, {"photometric": "rgb", "rowsperstrip": 9, "compression": "zlib"}, {}),
    (COLOUR, {"photometric": "rgb"}, {}),
    (COLOUR.transpose(2, 0, 1), TILES | {"planarconfig": "separate", "compression": "zlib"}, {}),
    (COLOUR.astype(np.uint16) * 16, TILES, {"bits": 12}),
    (GREY, {"tile": (16, 16), "compression": "packbits"}, {"channels": 1}),
    (GREY.astype(np.uint16) * 200, {"byteorder": ">"}, {"channels": 1, "bits": 16}),
    (BANDS, {"photometric": "minisblack", "planarconfig": "separate"}, {"channels": 5, "bits": 12}),
    (
        BANDS.astype(np.float32) / 4000,
        {"tile": (16, 16), "planarconfig": "separate"},
        {"channels": 5, "mean": [2.0]},
    ),
]


@pytest.mark.parametrize("number", range(len(FILES)))
def test_of_tiff_files_are_those_of_the_whole(tmp_path: Path, number: int) -> None:
    values, options, changes = FILES[number]
    dataset = tiffs(tmp_path, values, options, **changes)
    assert dataset.reads_bytes("train") == (values.dtype == np.uint8)
    check_rows(dataset)


def test_pixels_that_a_file_leaves_out_are_0(tmp_path: Path) -> None:
    dataset = tiffs(tmp_path, COLOUR.astype(np.uint16), TILES, bits=16, augment=False)
    for path in tmp_path.rglob("*.tif"):
        tiles = iter([zlib.compress(bytes([7] * 16 * 32 * 6)), *[b""] * 27])
        tifffile.imwrite(
            path, tiles, shape=(101, 101, 3), dtype=np.uint16, compression="zlib", **TILES
        )
    assert dataset.reads_rows("train")
    whole = dataset.image("train", 0)
    np.testing.assert_array_equal(dataset.rows("train", 0, 0, 5, 40), whole[:, 5:40])
    assert len(np.unique(whole)) == 2


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"photometric": "rgb", "rowsperstrip": 101, "compression": "zlib"}, {}),
        (TILES | {"compression": "jpeg"}, {}),
        (TILES, {"height_px": 50}),
        (TILES, {"channels": 1}),
        (TILES, {"transform": "torch.nn.Identity"}),
    ],
)
def test_files_that_are_read_whole(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    if options.get("compression") == "jpeg":
        pytest.importorskip("imagecodecs")
    dataset = tiffs(tmp_path, COLOUR, options, **changes)
    assert not dataset.reads_rows("train")
    assert dataset.rows("validation", 0, 0, 7, 20).shape == (dataset.shape[0], 13, 101)


@pytest.mark.parametrize(
    ("values", "chunks", "changes"),
    [
        (COLOUR, None, {}),
        (COLOUR, (1, 8, 101, 3), {}),
        (COLOUR.transpose(2, 0, 1), (1, 3, 20, 50), {}),
        (GREY.astype(np.uint16), None, {"channels": 1, "bits": 12}),
        (BANDS.astype(np.float32) / 4000, None, {"channels": 5, "mean": [2.0]}),
    ],
)
def test_of_hdf5_files_are_those_of_the_whole(
    tmp_path: Path, values: np.ndarray, chunks: Any, changes: dict[str, Any]
) -> None:
    dataset = hdf5(tmp_path, values, chunks, **changes)
    assert dataset.reads_bytes("train") == (values.dtype == np.uint8)
    check_rows(dataset)


def test_hdf5_files_of_large_chunks_or_other_sides_are_read_whole(tmp_path: Path) -> None:
    assert hdf5(tmp_path, COLOUR, (1, 101, 101, 3)).reads_rows("train") is False
    assert hdf5(tmp_path, COLOUR, None, height_px=50).reads_rows("train") is False
    assert hdf5(tmp_path, COLOUR, None, transform="torch.nn.Identity").reads_rows("train") is False


def hdf5(folder: Path, values: np.ndarray, chunks: Any, **changes: Any) -> Dataset:
    """Open a file of four images in two classes."""
    with h5py.File(folder / "x.h5", "w") as file:
        images = np.stack([values + np.asarray(number, values.dtype) for number in range(4)])
        file.create_dataset("images", data=images, chunks=chunks)
        file["labels"] = np.arange(4) % 2
    height, width = (side for side in values.shape if side > 8)
    fields: dict[str, Any] = {
        "image_key": "images",
        "label_key": "labels",
        "height_px": height,
        "width_px": width,
    }
    fields |= {"num_classes": 2, "normalization": "fixed"}
    return open_dataset(DataConfig(name="hdf5", path=str(folder / "x.h5"), **fields | changes), 0)


def test_values_beyond_the_bits_are_refused_by_rows_too(tmp_path: Path) -> None:
    dataset = tiffs(tmp_path, COLOUR.astype(np.uint16) * 17, TILES, bits=10)
    assert dataset.reads_rows("train")
    with pytest.raises(ConfigError, match=r"data\.bits=10: .*x\.tif has the value"):
        dataset.rows("train", 0, 0, 0, 30)


def test_of_a_source_that_reads_whole_images_are_cut_out(tmp_path: Path) -> None:
    dataset = slide(tmp_path, transform="torch.nn.Identity")
    assert dataset.reads_rows("validation") and not dataset.reads_rows("train")
    np.testing.assert_array_equal(
        dataset.rows("train", 0, 0, 20, 31), dataset.image("train", 0)[:, 20:31]
    )


@pytest.mark.parametrize(
    "open_source", [slide, lambda path, **more: tiffs(path, COLOUR, TILES, **more)]
)
def test_large_images_are_inspected_and_their_mean_computed_by_rows(
    open_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[Dataset.__module__]
    monkeypatch.setattr(module, "_BAND_PX", 30)
    whole = open_source(tmp_path, normalization="computed", augment=False)
    expected = whole.statistics()
    monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(type(whole), "values", None)  # which reads whole images
    monkeypatch.setattr("gems.data.images.cached", lambda folder, kind, key, make: make())
    found = type(whole)(whole.config, 0)
    for one, other in zip(found.statistics(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    read: list[tuple[int, int]] = []
    rows = type(whole).rows
    monkeypatch.setattr(
        type(whole), "rows", lambda self, *place: read.append(place[3:]) or rows(self, *place)
    )
    monkeypatch.setattr(type(whole), "sample", None)
    inspect_data(whole.config, 0)
    assert set(read) == {(0, 30), (30, 60), (60, 90), (90, 101)}


def test_no_pixel_is_read_twice_and_none_is_read_for_nothing(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = slide(tmp_path)
    asked = []
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


def test_memory_of_a_tiff_file_does_not_grow_with_the_height(tmp_path: Path) -> None:
    peaks = []
    for number, height in enumerate((256, 2048)):
        values = noise(0, height, 256)
        options = {"tile": (64, 64), "photometric": "rgb", "compression": "zlib"}
        peaks.append(peak_bytes(tiffs(tmp_path / str(number), values, options), 64))
    assert max(peaks) < 1.1 * min(peaks) + 20_000 and max(peaks) < 3 * 2048 * 256 * 4 / 8


def peak_bytes(dataset: Dataset, rows: int, read: Any = None) -> int:
    """Return the most that reading an image, or a mask, of `rows` rows a strip held at once."""
    read = dataset.rows if read is None else read
    read("validation", 0, 0, 0, 1)  # opens the file
    gc.collect()
    # a collection looks through what the reading leaves, and not through what all tests before left
    gc.freeze()
    tracemalloc.start()
    for first in range(0, dataset.shape[1], rows):
        read("validation", 0, 0, first, first + rows)
        gc.collect()  # what tifffile leaves of a file that was closed
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_height(library: str, tmp_path: Path) -> None:
    peaks = []
    for height in (2 * TILE[0], 16 * TILE[0]):
        folder = tmp_path / str(height)
        folder.mkdir()
        peaks.append(
            peak_bytes(
                slide(folder, (height + 45, 256 + 33), height_px=height, width_px=256), TILE[0] // 2
            )
        )
    whole = 3 * 16 * TILE[0] * 256 * 4
    assert max(peaks) < 1.1 * min(peaks) + 10_000 and max(peaks) < whole / 8


def check_bytes(dataset: Dataset, split: Any, draw: int, whole: np.ndarray) -> None:
    """Compare the bytes of a block with its values, to the last bit."""
    spans = (5, 31), (3, 20)
    stored = dataset.byte_rows(split, 0, draw, *spans[0], spans[1])
    mean, deviation = dataset.byte_scale()
    values = (stored.astype(np.float32) - mean) / deviation
    assert stored.dtype == np.uint8 and values.dtype == np.float32
    block = whole[:, slice(*spans[0]), slice(*spans[1])]
    np.testing.assert_array_equal(values, block, strict=True)


@pytest.mark.parametrize(
    ("suffix", "mode", "changes", "are_bytes"),
    [
        ("png", "RGB", {"normalization": "imagenet"}, True),
        ("png", "P", {"height_px": 37}, True),
        ("jpg", "RGB", {"normalization": "computed"}, True),
        ("png", "I;16", {"channels": 1, "bits": 16}, False),
        ("png", "RGB", {"nodata": 3}, False),
        ("png", "RGB", {"transform": "torch.nn.Identity"}, False),
    ],
)
def test_bytes_of_images_that_are_read_whole(
    tmp_path: Path, suffix: str, mode: str, changes: dict[str, Any], are_bytes: bool
) -> None:
    for place in ("train/a", "train/b", "validation/a", "validation/b"):
        (tmp_path / place).mkdir(parents=True)
        picture = PIL.Image.fromarray(COLOUR if mode != "I;16" else GREY.astype(np.uint16))
        picture = picture if mode in ("RGB", "I;16") else picture.convert(mode)
        picture.save(tmp_path / place / f"x.{suffix}")
    fields: dict[str, Any] = {"height_px": 101, "width_px": 101, "num_classes": 2}
    dataset = open_dataset(DataConfig(name="folder", path=str(tmp_path), **fields | changes), 0)
    assert dataset.reads_bytes("train") == are_bytes and not dataset.reads_rows("train")
    for draw in range(4 if are_bytes else 0):
        check_bytes(dataset, "train", draw, np.asarray(dataset.image("train", 0, draw)))


def check_masks(dataset: Dataset) -> None:
    """Compare the strips and a block of a mask with the whole, in all the ways that it is turned."""
    ends = even_ends(dataset.shape[1], 6)
    for split, draws in (("train", range(24)), ("validation", range(1))):
        assert dataset.reads_mask_rows(split)
        for draw in draws:
            whole = np.asarray(dataset.label(split, 0, draw))
            parts = [dataset.mask_rows(split, 0, draw, *span) for span in pairwise((0, *ends))]
            np.testing.assert_array_equal(np.concatenate(parts), whole)
            columns = (3, dataset.shape[-1] - 2)
            block = dataset.mask_rows(split, 0, draw, *(ends[1], ends[3]), *inner(dataset, columns))
            np.testing.assert_array_equal(block, whole[ends[1] : ends[3], ..., slice(*columns)])
        assert len(np.unique(whole)) > 1


def inner(dataset: Dataset, columns: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the ranges of the axes after the first, with some of the columns."""
    return [*((0, side) for side in dataset.shape[2:-1]), columns]


def masked(folder: Path, options: dict[str, Any], suffix: str = "tif", **changes: Any) -> Dataset:
    """Open three TIFF images with gaps in their middle, and masks of values 0, 7 and 9."""
    for number, place in enumerate(("images", "masks", "images", "masks")):
        path = folder / ("train", "validation")[number // 2] / place
        path.mkdir(parents=True)
        if place == "images":
            pixels = COLOUR.copy()
            pixels[30:50, 20:60] = 255
            tifffile.imwrite(path / "x.tif", pixels, **TILES)
        elif suffix == "tif":
            tifffile.imwrite(path / f"x.{suffix}", (GREY_SQUARE % 3 + 7) % 9, **options)
        else:
            PIL.Image.fromarray(GREY_SQUARE % 3).save(path / f"x.{suffix}")
    fields: dict[str, Any] = {"height_px": 101, "width_px": 101, "task": "segmentation"}
    fields |= {"num_classes": 2, "normalization": "fixed", "class_map": {"7": 0, "8": 1}}
    return open_dataset(DataConfig(name="masks", path=str(folder), **fields | changes), 0)


GREY_SQUARE = RANDOM.integers(0, 250, (101, 101), np.uint8)
SMALL_TILES = {"tile": (16, 32), "compression": "zlib"}


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (SMALL_TILES, {"ignore_label": 0, "class_map": {"7": 0, "8": 1}}),
        ({}, {"nodata": 255, "num_classes": 9, "class_map": {}}),
        (SMALL_TILES | {"extratags": [(42113, "s", 2, "8", True)]}, {"class_map": {"7": 1}}),
    ],
)
def test_of_masks_are_those_of_the_whole(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    dataset = masked(tmp_path, options, **changes)
    check_masks(dataset)
    dataset.examine("train", 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "suffix", "changes"),
    [
        (SMALL_TILES, "png", {}),
        ({"rowsperstrip": 101, "compression": "zlib"}, "tif", {}),
        (SMALL_TILES, "tif", {"transform": "torch.nn.Identity"}),
    ],
)
def test_masks_that_are_read_whole(
    tmp_path: Path, options: dict[str, Any], suffix: str, changes: dict[str, Any]
) -> None:
    dataset = masked(tmp_path, options, suffix, **changes, num_classes=9, class_map={})
    assert not dataset.reads_mask_rows("train")
    whole = dataset.label("validation", 0)
    np.testing.assert_array_equal(dataset.mask_rows("validation", 0, 0, 7, 20), whole[7:20])


@pytest.mark.parametrize("shape", [(101, 60), (1, 101, 60), (101, 60, 1)])
@pytest.mark.parametrize("chunk", [None, 8, 101])
def test_of_hdf5_masks_are_those_of_the_whole(
    tmp_path: Path, shape: tuple[int, ...], chunk: int | None
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = np.stack([GREY] * 4)
        chunks = chunk and (1, *(chunk if side == 101 else side for side in shape))
        file.create_dataset(
            "labels", data=np.stack([GREY.reshape(shape) % 3] * 4), chunks=chunks or None
        )
    fields: dict[str, Any] = {"height_px": 101, "width_px": 60, "channels": 1, "num_classes": 3}
    fields |= {"image_key": "images", "label_key": "labels", "normalization": "fixed"}
    data = DataConfig(name="hdf5", path=str(tmp_path / "x.h5"), task="segmentation", **fields)
    dataset = open_dataset(data, 0)
    if chunk == 101:
        assert not dataset.reads_mask_rows("train") and dataset.reads_rows("train")
    else:
        check_masks(dataset)


@pytest.mark.parametrize("depth", [None, 12])
def test_of_synthetic_masks_are_those_of_the_whole(depth: int | None) -> None:
    fields: dict[str, Any] = {"height_px": 40, "width_px": 40, "depth_px": depth, "num_classes": 3}
    dataset = open_dataset(DataConfig(name="synthetic", task="segmentation", **fields), 0)
    for split in ("train", "validation"):
        whole = dataset.label(split, 1, 5)
        np.testing.assert_array_equal(
            dataset.mask_rows(split, 1, 5, 2, 9, *inner(dataset, (4, 11))), whole[2:9, ..., 4:11]
        )


def test_memory_of_a_mask_does_not_grow_with_its_height(tmp_path: Path) -> None:
    peaks = []
    for height in (256, 2048):
        folder = tmp_path / str(height)
        for split in ("train", "validation"):
            for name, values in (("images", noise(0, height, 256)), ("masks", None)):
                (folder / split / name).mkdir(parents=True)
                pixels = np.zeros((height, 256), np.uint8) if values is None else values
                tifffile.imwrite(folder / split / name / "x.tif", pixels, tile=(64, 64))
        fields: dict[str, Any] = {"height_px": height, "width_px": 256, "task": "segmentation"}
        dataset = open_dataset(DataConfig(name="masks", path=str(folder), **fields), 0)
        peaks.append(peak_bytes(dataset, 64, dataset.mask_rows))
    assert max(peaks) < 1.1 * min(peaks) + 20_000 and max(peaks) < 2048 * 256 * 8 / 7

"""Tissue tiles: disjoint regions, honest labels, exact pixels, no network."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.color import rgb2hed
from skimage.data import immunohistochemistry

from gems.config.schema import DataConfig
from gems.data import Split, open_dataset, resolve_data, tissue
from gems.data.tissue import TissueDataset
from gems.errors import ConfigError

SPLITS: tuple[Split, Split] = ("train", "validation")


def tissue_data(**changes: object) -> DataConfig:
    fields = {"name": "tissue", "train_samples": 200, "validation_samples": 80, **changes}
    return DataConfig(**fields)  # type: ignore[arg-type]


def opened(seed: int = 0, **changes: object) -> TissueDataset:
    dataset = open_dataset(tissue_data(**changes), seed)
    assert isinstance(dataset, TissueDataset)
    return dataset


def columns_seen(dataset: TissueDataset, split: Split) -> NDArray[np.bool_]:
    """Mark each pixel of the slide that any tile of the split shows."""
    seen = np.zeros((512, 512), dtype=bool)
    height, width = dataset.field_shape_px
    for index in range(dataset.num_images(split)):
        top, left = dataset.position_px(split, index)
        assert 0 <= top <= 512 - height
        assert 0 <= left <= 512 - width
        seen[top : top + height, left : left + width] = True
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"field_of_view_px": 128, "height_px": 64, "width_px": 64},
        {"height_px": 20, "width_px": 90},
    ],
)
def test_no_pixel_is_in_both_splits(changes: dict[str, object]) -> None:
    dataset = opened(**changes)
    train, validation = (columns_seen(dataset, split) for split in SPLITS)
    assert not (train & validation).any()
    assert np.flatnonzero(train.any(axis=0)).max() < np.flatnonzero(validation.any(axis=0)).min()
    assert train.any()
    assert validation.any()


@pytest.mark.parametrize("field_of_view_px", [16, 33, 64, 128])
def test_labels_are_those_recomputed_from_the_pixels(field_of_view_px: int) -> None:
    dataset = opened(field_of_view_px=field_of_view_px)
    slide = immunohistochemistry()
    for split in SPLITS:
        for index in range(dataset.num_images(split)):
            top, left = dataset.position_px(split, index)
            tile = slide[top : top + field_of_view_px, left : left + field_of_view_px]
            positive = rgb2hed(tile)[:, :, 2] > dataset.pixel_threshold
            assert dataset.label(split, index) == int(positive.mean() > dataset.share_threshold)


def test_masks_are_those_recomputed_from_the_pixels() -> None:
    """At the slide's own scale each pixel's, and at another that of the source pixel in its middle."""
    same = opened(
        task="segmentation", field_of_view_px=48, height_px=48, width_px=48, augment=False
    )
    large = opened(task="segmentation", field_of_view_px=48, height_px=96, width_px=96)
    slide = immunohistochemistry()
    for split in SPLITS:
        for index in (0, 7, 31):
            top, left = same.position_px(split, index)
            positive = (
                rgb2hed(slide[top : top + 48, left : left + 48])[:, :, 2] > same.pixel_threshold
            )
            mask = np.asarray(same.label(split, index))
            assert mask.dtype == np.int64 and np.array_equal(mask, positive)
    mask = np.asarray(large.label("validation", 7))
    assert np.array_equal(mask, np.asarray(same.label("validation", 7)).repeat(2, 0).repeat(2, 1))


@pytest.mark.parametrize("field_of_view_px", [16, 32, 64, 128])
def test_both_splits_are_half_stained(field_of_view_px: int) -> None:
    dataset = opened(field_of_view_px=field_of_view_px)
    for split in SPLITS:
        counts = dataset.class_counts(split)
        assert sum(counts) == dataset.num_images(split)
        assert abs(counts[0] - counts[1]) <= 1


def test_thresholds_come_from_the_training_region_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened()
    slide = immunohistochemistry().copy()
    slide[:, tissue.TRAIN_COLUMNS_PX :] = slide[:, : 512 - tissue.TRAIN_COLUMNS_PX][::-1]
    monkeypatch.setattr(tissue, "read_slide", lambda: slide)
    after = opened()
    assert not np.array_equal(before.slide, after.slide)
    assert (before.pixel_threshold, before.share_threshold) == (
        after.pixel_threshold,
        after.share_threshold,
    )
    assert np.array_equal(before.image("train", 5, 1), after.image("train", 5, 1))


def test_a_region_of_one_class_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    slide = immunohistochemistry().copy()
    slide[:, tissue.TRAIN_COLUMNS_PX :] = 255
    monkeypatch.setattr(tissue, "read_slide", lambda: slide)
    assert opened().class_counts("validation") == (80, 0)


def test_the_seed_decides_training_tiles_and_never_validation_tiles() -> None:
    first = opened(0)
    again = opened(0)
    other = opened(1)
    places = [
        [data.position_px("train", index) for index in range(200)] for data in (first, again, other)
    ]
    assert places[0] == places[1]
    assert places[0] != places[2]
    for index in range(80):
        assert first.position_px("validation", index) == other.position_px("validation", index)
        assert np.array_equal(first.image("validation", index), again.image("validation", index))


def test_pixels_are_the_slides_normalised_by_the_training_region() -> None:
    dataset = opened(augment=False)
    slide = immunohistochemistry().astype(np.float64)
    known = slide[:, : tissue.TRAIN_COLUMNS_PX].reshape(-1, 3)
    for split in SPLITS:
        top, left = dataset.position_px(split, 3)
        expected = (slide[top : top + 32, left : left + 32] - known.mean(axis=0)) / known.std(
            axis=0
        )
        assert np.allclose(dataset.image(split, 3), expected.transpose(2, 0, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("height", "width", "field_of_view_px", "field_shape"),
    [
        (32, 32, None, (32, 32)),
        (1024, 1024, None, (64, 64)),
        (96, 48, None, (64, 32)),
        (37, 53, 53, (37, 53)),
        (16, 16, 100, (100, 100)),
        (4, 4, None, (8, 8)),
    ],
)
def test_a_tile_of_any_size_shows_a_field_of_its_proportions(
    height: int, width: int, field_of_view_px: int | None, field_shape: tuple[int, int]
) -> None:
    dataset = opened(
        height_px=height, width_px=width, field_of_view_px=field_of_view_px, train_samples=8
    )
    assert dataset.field_shape_px == field_shape
    image = dataset.image("train", 7, 2)
    assert image.shape == dataset.shape == (3, height, width)
    assert image.dtype == np.float32
    assert image.flags.c_contiguous
    assert np.isfinite(image).all()


def test_resampling_keeps_the_mean_of_the_field() -> None:
    small, large = (
        opened(height_px=side, width_px=side, field_of_view_px=64) for side in (16, 256)
    )
    for index in range(5):
        means = [data.image("validation", index).mean(axis=(1, 2)) for data in (small, large)]
        assert np.allclose(*means, atol=0.05)


def test_grey_tiles_have_one_channel() -> None:
    image = opened(channels=1).image("validation", 0)
    assert image.shape == (1, 32, 32)
    assert image.std() > 0


def test_augmentation_turns_the_tile_and_leaves_validation_alone() -> None:
    plain = opened(augment=False)
    augmented = opened()
    tile = plain.image("train", 0)
    turns = {turned.tobytes() for k in range(4) for turned in (np.rot90(tile, k, (1, 2)),)}
    turns |= {np.rot90(tile[:, :, ::-1], k, (1, 2)).tobytes() for k in range(4)}
    assert len(turns) == 8
    drawn = {augmented.image("train", 0, draw).tobytes() for draw in range(200)}
    assert drawn == turns
    assert np.array_equal(augmented.image("train", 0, 3), augmented.image("train", 0, 3))
    assert len({augmented.image("validation", 0, draw).tobytes() for draw in range(20)}) == 1


def test_a_tile_that_is_not_square_is_flipped_only() -> None:
    dataset = opened(height_px=20, width_px=30)
    images = {dataset.image("train", 0, draw).tobytes() for draw in range(100)}
    assert len(images) == 4


def test_opening_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("tissue asked for a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr("skimage.data._fetchers._fetch", refuse)
    assert opened().image("train", 0).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"channels": 4}, "data.channels"),
        ({"num_classes": 3}, "data.num_classes"),
        ({"field_of_view_px": 129}, "data.field_of_view_px"),
        ({"field_of_view_px": 4}, "data.field_of_view_px"),
    ],
)
def test_what_the_slide_does_not_have_is_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_dataset(tissue_data(**changes), 0)
    assert caught.value.key == key


def test_a_missing_slide_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr("skimage.__file__", f"{tmp_path}/__init__.py")
    with pytest.raises(ConfigError, match="the slide cannot be read"):
        open_dataset(tissue_data(), 0)


def test_resolving_fills_the_field_of_view() -> None:
    assert resolve_data(tissue_data(height_px=1024, width_px=512)).field_of_view_px == 64
    assert resolve_data(tissue_data(field_of_view_px=40)).field_of_view_px == 40
    assert resolve_data(DataConfig(name="synthetic")).field_of_view_px is None

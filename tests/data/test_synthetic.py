"""Synthetic images: any shape, deterministic, and a signal that a classifier can find."""

from __future__ import annotations

import numpy as np
import pytest

from gems.config.schema import DataConfig
from gems.data import open_dataset


@pytest.mark.parametrize(
    ("channels", "height", "width"),
    [(1, 1, 1), (5, 7, 300), (3, 37, 53), (2, 64, 64), (3, 257, 1024)],
)
def test_any_shape(channels: int, height: int, width: int) -> None:
    dataset = open_dataset(
        DataConfig(channels=channels, height_px=height, width_px=width, num_classes=3), 0
    )
    image = dataset.image("train", 4, 1)
    assert image.shape == dataset.shape == (channels, height, width)
    assert image.dtype == np.float32
    assert image.flags.c_contiguous
    assert np.isfinite(image).all()


def test_the_values_have_about_zero_mean_and_unit_variance() -> None:
    dataset = open_dataset(DataConfig(num_classes=50), 0)
    images = np.stack([dataset.image("train", index) for index in range(200)])
    assert abs(images.mean()) < 0.1
    assert 0.9 < images.var() < 1.1


def test_an_image_depends_on_seed_split_and_index_alone() -> None:
    data = DataConfig(augment=False)
    first = open_dataset(data, 0)
    again = open_dataset(data, 0)
    other = open_dataset(data, 1)
    assert np.array_equal(first.image("train", 9, 1), again.image("train", 9, 2))
    different = [
        first.image("train", 9),
        first.image("train", 11),
        first.image("validation", 9),
        other.image("train", 9),
    ]
    assert len({image.tobytes() for image in different}) == 4


def test_classes_are_balanced_and_all_present() -> None:
    dataset = open_dataset(DataConfig(num_classes=7, train_samples=100, validation_samples=21), 0)
    assert set(dataset.class_counts("train")) == {14, 15}
    assert dataset.class_counts("validation") == (3,) * 7


@pytest.mark.parametrize("num_classes", [2, 10])
def test_the_mean_image_of_a_class_recognises_new_images_of_it(num_classes: int) -> None:
    """The signal survives flips and quarter turns, so augmented training images show it too."""
    dataset = open_dataset(DataConfig(num_classes=num_classes, channels=1), 0)
    seen: list[list[np.ndarray]] = [[] for _ in range(num_classes)]
    for index in range(100):
        seen[dataset.label("train", index)].append(dataset.image("train", index, index))
    means = np.stack([np.mean(images, axis=0).ravel() for images in seen])
    right = 0
    for index in range(100):
        scores = means @ dataset.image("validation", index).ravel() - (means**2).sum(axis=1) / 2
        right += int(scores.argmax()) == dataset.label("validation", index)
    assert right >= 95


@pytest.mark.parametrize("index", [-1, 256])
def test_an_index_outside_the_split_is_refused(index: int) -> None:
    dataset = open_dataset(DataConfig(validation_samples=256), 0)
    with pytest.raises(IndexError, match="of 256 in validation"):
        dataset.image("validation", index)
    with pytest.raises(IndexError, match="of 256 in validation"):
        dataset.label("validation", index)


@pytest.mark.parametrize("task", ["segmentation", "multi_label", "regression"])
def test_labels_of_every_task_are_in_the_pixels(task: str) -> None:
    """The mean of many images with one label, without the noise, tells that label."""
    data = DataConfig(
        name="synthetic", task=task, num_classes=3, height_px=32, width_px=32, augment=False
    )
    dataset = open_dataset(data, 0)
    labels = np.stack([np.asarray(dataset.label("train", index)) for index in range(600)])
    images = np.stack([dataset.image("train", index) for index in range(600)])
    if task == "segmentation":
        assert (
            labels.dtype == np.int64
            and labels.shape == (600, 32, 32)
            and set(np.unique(labels)) == {0, 1, 2}
        )
        inside = images[1::3][:, 0][labels[1::3] == 1]
        outside = images[1::3][:, 0][labels[1::3] == 0]
        assert inside.mean() > 0.3 and outside.mean() < -0.3
        return
    assert labels.dtype == np.float32 and labels.shape == (600, 3)
    if task == "multi_label":
        assert set(np.unique(labels)) == {0, 1}
    design = np.column_stack([labels, np.ones(600)])
    fitted = design @ np.linalg.lstsq(design, images.reshape(600, -1), rcond=None)[0]
    explained = 1 - np.var(images.reshape(600, -1) - fitted) / np.var(images)
    assert explained > 0.15

"""Tables, masks and HDF5 files: each against the arrays that were written."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gems.config.schema import DataConfig
from gems.data import check_data, class_names
from gems.errors import ConfigError
from tests.helpers import file_data
from tests.helpers.file_data import SIDE, refused, save


def noise(seed: int, *shape: int, below: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


opened = partial(file_data.opened, normalization="none")


class TestTables:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        rows = ["file,grade,oedema,necrosis,age,split"]
        for number in range(6):
            save(tmp_path / "tiles" / f"{number}.png", noise(number, SIDE, SIDE, 3))
            split = "validation" if number > 3 else "train"
            rows.append(
                f"tiles/{number}.png,{'high' if number % 2 else 'low'},{number % 2},{number // 3},{number / 4},{split}"
            )
        (tmp_path / "t.csv").write_text("\n".join(rows))
        return tmp_path / "t.csv"

    def test_classes(self, table: Path) -> None:
        dataset = opened("table", table, label_columns=["grade"])
        assert class_names(dataset.config) == ["high", "low"]
        assert [dataset.label("train", index) for index in range(4)] == [
            1,
            0,
            1,
            0,
        ]  # high, low by name
        np.testing.assert_allclose(
            dataset.image("train", 2), noise(2, SIDE, SIDE, 3).transpose(2, 0, 1) / 255, atol=1e-6
        )

    def test_several_labels(self, table: Path) -> None:
        dataset = opened("table", table, label_columns=["oedema", "necrosis"], task="multi_label")
        _, labels = dataset.batch("train", np.array([[0, 0], [3, 0]]))
        assert labels.dtype == np.float32 and labels.tolist() == [[0, 0], [1, 1]]

    def test_one_value(self, table: Path) -> None:
        dataset = opened("table", table, label_columns=["age"], task="regression", num_classes=1)
        assert dataset.label("validation", 1).tolist() == [1.25]

    @pytest.mark.parametrize(
        ("changes", "key", "words"),
        [
            ({}, "data.label_columns", "must name the columns"),
            ({"label_columns": ["ages"]}, "data.path", "has no column ages"),
            (
                {"label_columns": ["age"], "task": "regression"},
                "data.num_classes",
                "set data.num_classes=1",
            ),
            (
                {"label_columns": ["grade"], "task": "regression", "num_classes": 1},
                "data.path",
                "line 2 has 'low' in column grade",
            ),
            (
                {"label_columns": ["age"], "task": "multi_label", "num_classes": 1},
                "data.task",
                "other than 0 and 1",
            ),
            ({"label_columns": ["grade", "oedema"]}, "data.label_columns", "is one column"),
            ({"label_columns": ["file"]}, "data.num_classes", "has 6 classes"),
            ({"label_columns": ["grade"], "num_classes": 1}, "data.num_classes", "2 or more"),
        ],
    )
    def test_that_are_refused(
        self, table: Path, changes: dict[str, Any], key: str, words: str
    ) -> None:
        error = refused("table", table, **changes)
        assert error.startswith(f"{key}=") and words in error


class TestMasks:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        for number in range(6):
            save(tmp_path / "images" / f"{number}.png", noise(number, SIDE, SIDE, 3))
            save(
                tmp_path / "masks" / f"{number}.tif",
                np.where(noise(number, SIDE, SIDE, below=2), 255, number % 2 * 7).astype(np.uint8),
            )
        return tmp_path

    def number(self, dataset: Any, split: Any, index: int) -> int:
        return int(Path(dataset.name_of(split, index)).stem)

    def test_the_numbers_in_them(self, root: Path) -> None:
        dataset = opened("masks", root, class_map={"255": 1}, ignore_label=7, task="segmentation")
        assert dataset.num_train + dataset.num_validation == 6
        for split, index in (("train", 0), ("train", 1), ("validation", 0)):
            number = self.number(dataset, split, index)
            expected = np.where(noise(number, SIDE, SIDE, below=2), 1, -1 if number % 2 else 0)
            np.testing.assert_array_equal(dataset.label(split, index), expected)
        inside = sum(
            int((np.asarray(dataset.label("train", i)) >= 0).sum())
            for i in range(dataset.num_train)
        )
        assert sum(dataset.class_counts("train")) == inside

    @pytest.mark.parametrize("transform", [None, "albumentations.D4"])
    def test_turn_with_their_images(self, tmp_path: Path, transform: str | None) -> None:
        if transform:
            pytest.importorskip("albumentations")
        for number in range(4):
            grey = noise(number, SIDE, SIDE)
            save(tmp_path / "images" / f"{number}.png", grey)
            save(tmp_path / "masks" / f"{number}.png", grey // 128)
        dataset = opened("masks", tmp_path, channels=1, augment=True, transform=transform)
        seen = set()
        for draw in range(8):
            image = dataset.image("train", 0, draw)
            mask = dataset.label("train", 0, draw)
            np.testing.assert_array_equal(image[0] * 255 >= 127.9, mask == 1)
            both = dataset.sample("train", 0, draw)
            assert np.array_equal(both[0], image) and np.array_equal(both[1], mask)
            seen.add(mask.tobytes())
        assert len(seen) > 2

    def test_are_fitted_by_the_nearest_pixel(self, root: Path) -> None:
        dataset = opened("masks", root, height_px=5, width_px=11, class_map={"255": 1, "7": 1})
        assert dataset.label("train", 0).shape == (5, 11)
        assert set(np.unique(dataset.label("train", 0))) <= {0, 1}

    def test_that_are_refused(self, root: Path) -> None:
        error = refused("masks", root)
        assert (
            error.startswith("data.num_classes=")
            and "and there are classes 0 to 1" in error
            and ".tif" in error
        )
        (root / "masks" / "3.tif").unlink()
        assert "3.png has no mask of the same name" in refused("masks", root)
        assert "names tumour" in refused("masks", root, class_map={"tumour": 1})
        assert "has no folder" in refused("masks", root / "images")


class TestHdf5:
    def write(self, path: Path, count: int = 6, seed: int = 0, **attributes: Any) -> np.ndarray:
        images = noise(seed, count, SIDE, SIDE, 3)
        with h5py.File(path, "w") as file:
            file["pixels"] = images
            file["pixels"].attrs.update(attributes)
            file["grade"] = np.arange(count) % 2
            file["mask"] = images[..., 0] // 128
            file["chw"] = images.transpose(0, 3, 1, 2)
            file["values"] = np.linspace(0, 1, count, dtype=np.float32)[:, None]
        return images

    def test_one_file(self, tmp_path: Path) -> None:
        images = self.write(tmp_path / "a.h5")
        for key in ("pixels", "chw"):
            dataset = opened("hdf5", tmp_path / "a.h5", image_key=key, label_key="grade")
            row = int(dataset.name_of("train", 1).rpartition("[")[2][:-1])
            np.testing.assert_allclose(
                dataset.image("train", 1), images[row].transpose(2, 0, 1) / 255, atol=1e-6
            )
            assert dataset.label("train", 1) == row % 2

    def test_many_files_and_a_split_by_their_names(self, tmp_path: Path) -> None:
        self.write(tmp_path / "train_0.h5", 3)
        images = self.write(tmp_path / "train_1.h5", 4, seed=1)
        self.write(tmp_path / "validation_0.h5", 2)
        dataset = opened("hdf5", tmp_path / "{split}_*.h5", image_key="pixels", label_key="grade")
        assert (dataset.num_train, dataset.num_validation) == (7, 2)
        np.testing.assert_allclose(
            dataset.image("train", 4), images[1].transpose(2, 0, 1) / 255, atol=1e-6
        )
        copy = pickle.loads(pickle.dumps(dataset))  # to a process that opens the files itself
        np.testing.assert_array_equal(copy.image("train", 4), dataset.image("train", 4))

    def test_masks_and_values(self, tmp_path: Path) -> None:
        images = self.write(tmp_path / "a.h5")
        dataset = opened(
            "hdf5", tmp_path / "a.h5", image_key="pixels", label_key="mask", task="segmentation"
        )
        row = int(dataset.name_of("train", 0).rpartition("[")[2][:-1])
        np.testing.assert_array_equal(dataset.label("train", 0), images[row, ..., 0] // 128)
        values = opened(
            "hdf5",
            tmp_path / "a.h5",
            image_key="pixels",
            label_key="values",
            task="regression",
            num_classes=1,
        )
        assert values.label("train", 0).shape == (1,)

    def test_an_attribute_or_a_key_says_the_axes(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["images"], file["labels"] = noise(0, 4, 3, SIDE, 3), np.arange(4) % 2
        assert "say chw or hwc" in refused("hdf5", tmp_path / "a.h5")
        assert opened("hdf5", tmp_path / "a.h5", layout="hwc").values("train", 0).shape == (
            3,
            SIDE,
            SIDE,
        )
        with h5py.File(tmp_path / "a.h5", "a") as file:
            file["images"].attrs["layout"] = "CHW"
        assert opened("hdf5", tmp_path / "a.h5").values("train", 0).shape == (3, SIDE, SIDE)

    @pytest.mark.parametrize(
        ("changes", "key", "words"),
        [
            ({"image_key": "tiles"}, "data.image_key", "it has chw, grade, mask, pixels, values"),
            (
                {"image_key": "pixels", "label_key": "grade", "channels": 2},
                "data.channels",
                "has images of shape (8, 8, 3)",
            ),
            (
                {"image_key": "pixels", "label_key": "grade", "num_classes": 1},
                "data.num_classes",
                "2 or more",
            ),
            (
                {"image_key": "pixels", "label_key": "values"},
                "data.task",
                "a class is a whole number",
            ),
            ({"path": "nowhere/*.h5"}, "data.path", "no file is called"),
        ],
    )
    def test_that_are_refused(
        self, tmp_path: Path, changes: dict[str, Any], key: str, words: str
    ) -> None:
        self.write(tmp_path / "a.h5")
        error = refused("hdf5", changes.pop("path", tmp_path / "a.h5"), **changes)
        assert error.startswith(f"{key}=") and words in error

    def test_a_label_out_of_range_is_found_before_a_run(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["images"], file["labels"] = (
                noise(0, 9, SIDE, SIDE, 3),
                np.array([0, 1, 0, 1, 0, 1, 0, 7, 0]),
            )
        error = refused("hdf5", tmp_path / "a.h5")
        assert error.startswith("data.num_classes=") and "images[7] has label 7" in error

    def test_no_hdf5_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.h5").write_text("x")
        assert "is no readable HDF5 file" in refused("hdf5", tmp_path / "a.h5")


@pytest.mark.parametrize("path", [None, "/nowhere"])
@pytest.mark.parametrize("name", ["folder", "masks", "table", "hdf5"])
def test_a_path_is_needed(name: str, path: str | None) -> None:
    columns = ["x"] if name == "table" else []
    with pytest.raises(ConfigError, match=path) as caught:
        check_data(DataConfig(name=name, path=path, label_columns=columns))
    assert caught.value.key == "data.path"


@pytest.mark.parametrize(
    ("name", "key", "value", "reader"),
    [
        ("tissue", "split_path", "x.csv", "data=hdf5"),
        ("folder", "label_columns", ["x"], "data=table"),
        ("masks", "image_key", "x", "data=hdf5"),
        ("synthetic", "class_map", {"a": 1}, "data=folder"),
    ],
)
def test_a_key_of_another_source_is_refused(name: str, key: str, value: Any, reader: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(DataConfig(**{"name": name, key: value}))
    assert caught.value.key == f"data.{key}"
    assert f"is not read by data={name}" in str(caught.value) and reader in str(caught.value)

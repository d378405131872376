"""Masks, folders, tables, HDF5 labels and own datasets as users have them.

Read right, or refused by file and line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from gems.config.schema import DataConfig
from gems.data import check_data, class_names, open_dataset
from gems.data.dataset import NO_LABEL
from gems.data.files.values import have_one_shape
from gems.errors import ConfigError
from tests.helpers.file_data import SIDE, data_of, opened, refused, save

pytestmark = pytest.mark.cases


def save_pair(
    root: Path, number: int, mask: np.ndarray, size: tuple[int, int] | None = None, **kwargs: Any
) -> None:
    grey = np.asarray(
        Image.fromarray((mask > 0).astype(np.uint8) * 200).resize(size or mask.shape[::-1], 0)
    )
    save(root / "images" / f"{number}.png", np.dstack([grey] * 3), **kwargs)
    save(root / "masks" / f"{number}.png", mask)


def stripe(height: int, width: int, value: int = 1) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    mask[:, : width // 4] = value
    mask[0] = value
    return mask


def unchanged(image: Any, mask: Any) -> Any:
    return image, mask


class TestMasks:
    @pytest.mark.parametrize("orientation", range(2, 9))
    @pytest.mark.parametrize("width", [SIDE, 2 * SIDE])
    def test_are_turned_as_their_images_are(
        self, tmp_path: Path, orientation: int, width: int
    ) -> None:
        tags = Image.Exif()
        tags[274] = orientation
        for number in range(2):
            save_pair(tmp_path, number, stripe(SIDE, width), exif=tags)
        sides = (width, SIDE) if orientation > 4 else (SIDE, width)
        dataset = opened("masks", tmp_path, height_px=sides[0], width_px=sides[1])
        for split in ("train", "validation"):
            image, mask = dataset.sample(split, 0)
            np.testing.assert_array_equal(image[0] > 0, mask == 1)

    def test_drawn_on_the_upright_image_stay(self, tmp_path: Path) -> None:
        tags = Image.Exif()
        tags[274] = 6
        upright = stripe(2 * SIDE, SIDE)
        for number in range(2):
            save(tmp_path / "masks" / f"{number}.png", upright)
            save(
                tmp_path / "images" / f"{number}.png",
                np.dstack([np.rot90(upright) * 200] * 3),
                exif=tags,
            )
        image, mask = opened("masks", tmp_path, height_px=2 * SIDE).sample("train", 0)
        np.testing.assert_array_equal(image[0] > 0, mask == 1)

    def test_of_another_shape_are_refused(self, tmp_path: Path) -> None:
        for number in range(6):
            save_pair(
                tmp_path, number, stripe(SIDE, SIDE), (2 * SIDE, SIDE) if number == 4 else None
            )
        said = refused("masks", tmp_path)
        assert (
            "masks/4.png: has 8 x 8 px, and its image" in said
            and "4.png has 16 x 8; give both one size" in said
        )

    def test_of_half_the_sides_are_of_one_shape(self) -> None:
        same = [((64, 64), (128, 128)), ((512, 341), (1024, 683)), ((9, 7), (9, 7))]
        other = [
            ((64, 64), (128, 64)),
            ((100, 100), (101, 100)),
            ((4, 3), (8, 8)),
            ((64, 128), (128, 64)),
        ]
        assert all(
            have_one_shape(first, second) and have_one_shape(second, first)
            for first, second in same
        )
        assert not any(
            have_one_shape(first, second) or have_one_shape(second, first)
            for first, second in other
        )

    @pytest.mark.parametrize(
        ("values", "num_classes", "advice"),
        [
            ([0, 255], 2, "set data.class_map.255=1"),
            ([255], 2, "set data.class_map.255=1"),
            ([0, 128, 255], 3, "set data.class_map={128:1,255:2}"),
            ([0, 128, 255], 2, "set data.class_map={128:1,255:2} and data.num_classes=3"),
            (
                [0, 1, 255],
                3,
                (
                    "set data.class_map.255=2, or data.ignore_label=255 if such pixels are to be"
                    " ignored"
                ),
            ),
            (
                [0, 2],
                2,
                (
                    "set data.num_classes=3 or more, or data.ignore_label if that value is to be"
                    " ignored"
                ),
            ),
        ],
    )
    def test_of_other_values_get_advice(
        self, tmp_path: Path, values: list[int], num_classes: int, advice: str
    ) -> None:
        for number in range(3):
            mask = np.zeros((SIDE, SIDE)) if number == 0 else np.resize(values, (SIDE, SIDE))
            save_pair(tmp_path, number, mask)
        assert refused("masks", tmp_path, num_classes=num_classes).endswith(advice)

    def test_as_jpeg_are_refused_if_that_changed_them(self, tmp_path: Path) -> None:
        for number in range(2):
            save_pair(tmp_path, number, stripe(SIDE, SIDE))
            (tmp_path / "masks" / f"{number}.png").unlink()
            save(tmp_path / "masks" / f"{number}.jpg", stripe(SIDE, SIDE, 255), quality=70)
        said = refused("masks", tmp_path, class_map={255: 1})
        assert (
            "as compression to JPEG changes the numbers of a mask; make the masks again, as PNG"
            in said
        )

    def test_of_255_are_read_as_advised(self, tmp_path: Path) -> None:
        for number in range(3):
            save_pair(tmp_path, number, stripe(SIDE, SIDE, 255))
        dataset = opened("masks", tmp_path, class_map={255: 1})
        np.testing.assert_array_equal(dataset.label("train", 0), stripe(SIDE, SIDE))

    @pytest.mark.parametrize("transform", [None, f"{__name__}.unchanged"])
    def test_an_image_with_gaps_is_read_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transform: str | None
    ) -> None:
        for number in range(4):
            save_pair(tmp_path, number, stripe(SIDE, SIDE))
        dataset = opened("masks", tmp_path, nodata="0", transform=transform)
        dataset.statistics()
        read, reads = dataset.values, []
        monkeypatch.setattr(dataset, "values", lambda *place: reads.append(place) or read(*place))
        _, mask = dataset.sample("train", 0)
        assert len(reads) == 1 and set(np.unique(mask)) == {NO_LABEL, 1}


class TestFolders:
    def fill(self, root: Path, *folders: str, count: int = 3) -> Path:
        for folder in folders:
            for number in range(count):
                save(root / folder / f"{number}.png", np.full((SIDE, SIDE, 3), number * 9))
        return root

    def test_what_systems_leave_is_no_class_and_no_image(self, tmp_path: Path) -> None:
        root = self.fill(tmp_path, "a", "b")
        left = [
            "__MACOSX/a/._0.png",
            "@eaDir/x",
            ".ipynb_checkpoints/x",
            "a/.DS_Store",
            "a/Thumbs.db",
            "b/._0.png",
        ]
        for name in (*left, "b/@eaDir/0.png"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"x")
        dataset = opened("folder", root)
        assert class_names(dataset.config) == ["a", "b"]
        assert dataset.num_train + dataset.num_validation == 6

    def test_an_empty_class_is_refused(self, tmp_path: Path) -> None:
        root = self.fill(tmp_path, "a", "b")
        (root / "gamma").mkdir()
        assert "the class gamma has no image for training" in refused("folder", root, num_classes=3)
        split = self.fill(tmp_path / "x", "train/a", "val/a", "val/b")
        (split / "train" / "b").mkdir()
        assert "the class b has no image for training" in refused("folder", split)

    @pytest.mark.parametrize("name", ["validation", "val", "valid"])
    def test_of_a_split_have_any_usual_name(self, tmp_path: Path, name: str) -> None:
        kinds = [f"{split}/{kind}" for split in ("train", name, "test") for kind in "ab"]
        dataset = opened("folder", self.fill(tmp_path, *kinds))
        assert (dataset.num_train, dataset.num_validation) == (6, 6)
        assert dataset.path("validation", 0).parts[-3] == name
        for split in ("train", name):
            for number in range(2):
                save_pair(tmp_path / "pairs" / split, number, stripe(SIDE, SIDE))
        assert opened("masks", tmp_path / "pairs").num_validation == 2

    def test_of_a_split_that_are_refused(self, tmp_path: Path) -> None:
        both = self.fill(tmp_path / "x", "train/a", "train/b", "val/a", "validation/a")
        assert "has validation/ and val/, both for validation; keep one" in refused("folder", both)
        half = self.fill(tmp_path / "y", "train/a", "train/b", "test/a")
        assert "it has train/ but not the other split" in refused("folder", half)
        assert opened("folder", self.fill(tmp_path / "z", "valid", "wrong")).num_classes == 2

    @pytest.mark.parametrize("name", ["folder", "masks", "table", "hdf5"])
    def test_a_home_that_is_not_there(self, name: str) -> None:
        with pytest.raises(ConfigError) as caught:
            check_data(
                data_of(
                    name, "~nobody-of-this-name/x", label_columns=["a"] if name == "table" else []
                )
            )
        assert (
            str(caught.value)
            == "data.path=~nobody-of-this-name/x: begins with ~, and there is no such home folder; "
            "set HOME, or give the whole path"
        )


def test_a_long_check_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        save_pair(tmp_path, number, stripe(SIDE, SIDE))
    monkeypatch.setattr("gems.data.inspection._PAUSES_S", (-1.0, -1.0))
    opened("masks", tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"gems: checked {count} of 3 samples before training" for count in (1, 2, 3)]


class TestTables:
    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            (
                ["0.png,a", "1.png,b", "", "2.png,"],
                "line 5 has no label; fill it, or remove the line (t.csv:5)",
            ),
            (["0.png,a", " ,b"], "line 3 has no file; fill it, or remove the line (t.csv:3)"),
        ],
    )
    def test_an_empty_cell_is_named(self, tmp_path: Path, rows: list[str], words: str) -> None:
        (tmp_path / "t.csv").write_text("\n".join(["file,label", *rows]))
        assert refused("table", tmp_path / "t.csv", label_columns=["label"]).endswith(words)
        assert refused("folder", tmp_path, labels_path=str(tmp_path / "t.csv")).endswith(words)

    def test_a_class_that_is_only_validated_is_refused(self, tmp_path: Path) -> None:
        rows = ["0.png,a,train", "1.png,b,train", "2.png,c,val", "3.png,a,val"]
        (tmp_path / "t.csv").write_text("\n".join(["file,label,split", *rows]))
        for number in range(4):
            save(tmp_path / f"{number}.png", np.full((SIDE, SIDE, 3), number))
        words = {"label_columns": ["label"], "num_classes": 3}
        assert "the class c has no image for training" in refused(
            "table", tmp_path / "t.csv", **words
        )
        merged = {**words, "num_classes": 2, "class_map": {"a": 0, "b": 1, "c": 1}}
        assert opened("table", tmp_path / "t.csv", **merged).num_train == 2

    def test_a_value_that_is_not_finite_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("file,age\n0.png,1\n1.png,nan\n")
        said = refused(
            "table", tmp_path / "t.csv", label_columns=["age"], task="regression", num_classes=1
        )
        assert "line 3 has 'nan' in column age" in said


class TestHdf5:
    def write(self, path: Path, labels: Any, prefix: str = "", count: int = 6) -> Path:
        with h5py.File(path, "a") as file:
            file[f"{prefix}images"] = np.full((count, SIDE, SIDE, 3), 9, np.uint8)
            file[f"{prefix}labels"] = labels
        return path

    def test_labels_of_one_column_are_classes(self, tmp_path: Path) -> None:
        dataset = opened("hdf5", self.write(tmp_path / "a.h5", (np.arange(6) % 2)[:, None]))
        assert sorted(dataset.label("train", index) for index in range(2)) == [0, 1]
        masks = (np.arange(6 * SIDE * SIDE) % 2).reshape(6, SIDE, SIDE, 1)
        for name, given in (("b.h5", masks), ("c.h5", masks.transpose(0, 3, 1, 2))):
            dataset = opened("hdf5", self.write(tmp_path / name, given), task="segmentation")
            np.testing.assert_array_equal(dataset.label("train", 0), masks[0, ..., 0])

    @pytest.mark.parametrize("kind", ["S6", "utf-8", "one column"])
    def test_labels_of_text_are_names_of_classes(self, tmp_path: Path, kind: str) -> None:
        names = ["tumour", "benign"] * 3
        labels: Any = (
            np.array(names, "S6") if kind == "S6" else np.array(names, h5py.string_dtype())
        )
        path = self.write(tmp_path / "a.h5", labels[:, None] if kind == "one column" else labels)
        dataset = opened("hdf5", path)
        assert class_names(dataset.config) == ["benign", "tumour"]
        row = int(dataset.name_of("train", 0).rpartition("[")[2][:-1])
        assert dataset.label("train", 0) == (row + 1) % 2
        assert "has 2 classes (benign, tumour); set data.num_classes=2" in refused(
            "hdf5", path, num_classes=3
        )
        assert (
            opened("hdf5", path, class_map={"benign": 1, "tumour": 0}).label("train", 0) == row % 2
        )
        assert "texts are names of classes" in refused("hdf5", path, task="regression")

    def test_masks_of_another_shape_are_refused(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.h5", np.zeros((6, SIDE, 2 * SIDE), np.uint8))
        assert "has masks of (8, 16) in labels, and images of (8, 8)" in refused(
            "hdf5", path, task="segmentation"
        )

    def test_a_bad_mask_of_many_is_found(self, tmp_path: Path) -> None:
        masks = np.zeros((6, SIDE, SIDE), np.uint8)
        masks[5, 0, 0] = 255
        said = refused("hdf5", self.write(tmp_path / "a.h5", masks), task="segmentation")
        assert "images[5] has label 255" in said and said.endswith("set data.class_map.255=1")

    def test_a_split_may_be_called_val(self, tmp_path: Path) -> None:
        self.write(tmp_path / "a.h5", np.arange(6) % 2, "train_")
        path = self.write(tmp_path / "a.h5", np.arange(4) % 2, "val_", 4)
        dataset = opened("hdf5", path, image_key="{split}_images", label_key="{split}_labels")
        assert (dataset.num_train, dataset.num_validation) == (6, 4)


class OneLabelEach:
    def __init__(self, value: float = 0.5) -> None:
        self.value = value

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return np.full((3, SIDE, SIDE), self.value, np.float32), np.array([index % 2])


class TestOwnDatasets:
    def data(self, value: float) -> DataConfig:
        return DataConfig(
            target=f"{__name__}.OneLabelEach",
            height_px=SIDE,
            width_px=SIDE,
            kwargs={"value": value},
        )

    def test_an_array_of_one_label_is_a_class(self) -> None:
        import torch  # noqa: F401  # a process without it asks a child

        check_data(self.data(0.5))
        assert isinstance(open_dataset(self.data(0.5), 0).label("train", 1), int)

    def test_values_that_are_not_finite_are_refused(self) -> None:
        import torch  # noqa: F401

        with pytest.raises(
            ConfigError, match=r"has 192 values that are not finite, the first \(inf\) in row 0"
        ):
            check_data(self.data(float("inf")))

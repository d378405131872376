"""A folder of images: both layouts, and each fault named before the first step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gems.config.schema import DataConfig
from gems.data import Split, check_data, class_names, open_dataset
from gems.data.folder import FolderDataset
from gems.data.inspection import inspect_data
from gems.errors import ConfigError

COLOURS = {"alpha": (250, 10, 10), "beta": (10, 10, 250)}


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 12)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def fill(root: Path, count: int = 5, suffix: str = "png") -> Path:
    for name, colour in COLOURS.items():
        for number in range(count):
            paint(root / name / f"{number}.{suffix}", colour)
    return root


def folder_data(root: Path, **changes: object) -> DataConfig:
    fields = {"name": "folder", "path": str(root), "height_px": 8, "width_px": 16, **changes}
    return DataConfig(**fields)  # type: ignore[arg-type]


def opened(root: Path, seed: int = 0, **changes: object) -> FolderDataset:
    inspect_data(folder_data(root, **changes), seed)
    dataset = open_dataset(folder_data(root, **changes), seed)
    assert isinstance(dataset, FolderDataset)
    return dataset


def refused(root: Path, **changes: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        inspect_data(folder_data(root, **changes), 0)
    assert "\n" not in str(caught.value)
    return caught.value


def noise_file(path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_given_splits_are_kept(tmp_path: Path) -> None:
    fill(tmp_path / "train", 4)
    fill(tmp_path / "validation", 2)
    dataset = opened(tmp_path)
    assert (dataset.num_train, dataset.num_validation) == (8, 4)
    assert dataset.class_counts("train") == (4, 4)
    for index in range(4):
        name = list(COLOURS)[dataset.label("validation", index)]
        assert dataset.path("validation", index).parent == tmp_path / "validation" / name
        expected = (np.array(COLOURS[name]) - 127.5) / 64
        assert np.allclose(dataset.image("validation", index), expected[:, None, None], atol=1e-6)


def test_a_class_missing_from_validation_keeps_the_numbering(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    paint(tmp_path / "validation" / "beta" / "0.png", COLOURS["beta"])
    assert opened(tmp_path).class_counts("validation") == (0, 1)


def test_without_splits_the_seed_divides_each_class(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    first = opened(tmp_path, 0)
    again = opened(tmp_path, 0)
    other = opened(tmp_path, 5)
    assert first.class_counts("train") == (8, 8)
    assert first.class_counts("validation") == (2, 2)
    held_out = [
        {data.path("validation", index) for index in range(4)} for data in (first, again, other)
    ]
    trained = {first.path("train", index) for index in range(16)}
    assert held_out[0] == held_out[1] != held_out[2]
    assert not held_out[0] & trained
    assert len(held_out[0] | trained) == 20


def test_the_share_of_validation_follows_the_two_counts(tmp_path: Path) -> None:
    dataset = opened(fill(tmp_path, 10), train_samples=50, validation_samples=50)
    assert dataset.class_counts("validation") == (5, 5)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
@pytest.mark.parametrize("stored", ["L", "RGB", "RGBA", "P", "1"])
def test_any_stored_mode_gives_the_configured_channels(
    tmp_path: Path, channels: int, mode: str, stored: str
) -> None:
    fill(tmp_path)
    noise_file(tmp_path / "alpha" / "0.png")
    with Image.open(tmp_path / "alpha" / "0.png") as picture:
        picture = picture.convert(stored)
    picture.save(tmp_path / "alpha" / "0.png")
    if (channels, stored) == (1, "P"):  # grey of a palette may be meant, or its indices
        assert refused(tmp_path, channels=channels).key == "data.channels"
        return
    dataset = opened(tmp_path, channels=channels, height_px=64, width_px=64, augment=False)
    splits: tuple[Split, Split] = ("train", "validation")
    places = [(split, index) for split in splits for index in range(dataset.num_images(split))]
    (place,) = [place for place in places if dataset.path(*place) == tmp_path / "alpha" / "0.png"]
    image = dataset.image(*place)
    assert image.shape == (channels, 64, 64)
    expected = np.asarray(picture.convert(mode), dtype=np.float32).reshape(64, 64, channels)
    assert np.allclose(image, ((expected - 127.5) / 64).transpose(2, 0, 1))


def test_an_image_is_scaled_to_cover_and_its_middle_kept(tmp_path: Path) -> None:
    fill(tmp_path)
    stripes = np.zeros((40, 120, 3), dtype=np.uint8)
    stripes[:, 40:80] = 255
    for number in range(5):
        Image.fromarray(stripes).save(tmp_path / "alpha" / f"{number}.png")
    image = opened(tmp_path, height_px=20, width_px=20).image("validation", 0)
    assert image.shape == (3, 20, 20)
    assert np.allclose(image[:, :, 2:-2], 127.5 / 64)


def test_another_number_of_classes_is_refused_without_opening_a_file(tmp_path: Path) -> None:
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.png").write_bytes(b"not an image, never opened")
    with pytest.raises(ConfigError) as caught:
        check_data(folder_data(tmp_path))
    assert caught.value.key == "data.num_classes"
    assert "3 classes (alpha, beta, gamma)" in str(caught.value)
    assert "data.num_classes=3" in str(caught.value)
    check_data(folder_data(tmp_path, num_classes=3))


def test_an_empty_folder_tells_the_layout(tmp_path: Path) -> None:
    assert "PATH/train/CLASS/*" in str(refused(tmp_path))


def test_a_class_only_in_validation_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / "validation")
    paint(tmp_path / "validation" / "gamma" / "0.png", (0, 0, 0))
    assert "gamma" in str(refused(tmp_path))


def test_a_split_without_images_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    assert "no image is left for validation" in str(refused(tmp_path))


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "bmp"])
@pytest.mark.parametrize("fault", ["truncated", "empty", "text"])
def test_a_bad_file_is_named_when_the_folder_is_inspected(
    tmp_path: Path, suffix: str, fault: str
) -> None:
    fill(tmp_path, suffix=suffix)
    opened(tmp_path)
    bad = noise_file(tmp_path / "beta" / f"3.{suffix}")
    opened(tmp_path)
    whole = bad.read_bytes()
    bad.write_bytes(
        {"truncated": whole[: len(whole) * 2 // 3], "empty": b"", "text": b"image, 1\n" * 50}[fault]
    )
    error = refused(tmp_path)
    assert error.key == "data.path"
    assert str(bad) in str(error)
    assert "not a readable image" in str(error)


def test_a_flipped_byte_in_a_png_is_found(tmp_path: Path) -> None:
    fill(tmp_path)
    bad = noise_file(tmp_path / "alpha" / "2.png")
    whole = bytearray(bad.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    bad.write_bytes(whole)
    assert str(bad) in str(refused(tmp_path))


def test_values_without_a_known_range_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, suffix="tif")
    Image.fromarray(np.zeros((8, 8), dtype=np.int32)).save(tmp_path / "alpha" / "1.tif")
    assert "mode I" in str(refused(tmp_path))


def test_names_of_classes(tmp_path: Path) -> None:
    """Numbers once the folder is gone, unless data.class_map has them."""
    data = folder_data(fill(tmp_path / "images"))
    names = class_names(data)
    assert names == sorted(COLOURS) and len(names) == data.num_classes
    shutil.rmtree(tmp_path / "images")
    assert class_names(data) == ["0", "1"]
    assert class_names(replace(data, class_map={"benign": 1})) == ["0", "benign"]


def test_an_image_beyond_pillows_limit_is_welcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert opened(fill(tmp_path)).image("train", 0).shape == (3, 8, 16)


def test_other_channels_are_refused(tmp_path: Path) -> None:
    assert refused(fill(tmp_path), channels=2).key == "data.channels"


def test_a_class_has_the_files_of_folders_in_its_folder(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    paint(tmp_path / "alpha" / "patient7" / "slide2" / "9.png", COLOURS["alpha"])
    paint(tmp_path / "alpha" / ".thumbnails" / "9.png", COLOURS["alpha"])
    dataset = opened(tmp_path)
    assert np.add(dataset.class_counts("train"), dataset.class_counts("validation")).tolist() == [
        3,
        2,
    ]


def test_names_may_share_a_number(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    for number in range(4):
        paint(tmp_path / "gamma" / f"{number}.png", COLOURS["beta"])
    dataset = opened(tmp_path, class_map={"alpha": 1, "beta": 0, "gamma": 0})
    assert dataset.class_counts("validation") == (2, 1)
    assert "lacks the class gamma" in str(refused(tmp_path, class_map={"alpha": 1, "beta": 0}))
    assert "data.num_classes is 2" in str(
        refused(tmp_path, class_map={"alpha": 1, "beta": 0, "gamma": 2})
    )


class TestATableOfClasses:
    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        for number in range(6):
            paint(tmp_path / "all" / f"{number}.png", COLOURS["alpha" if number % 2 else "beta"])
        return tmp_path / "all"

    def table(self, files: Path, text: str) -> Path:
        path = files.parent / "labels.csv"
        path.write_text(text)
        return path

    def test_with_a_split(self, files: Path) -> None:
        rows = "".join(
            f"{n}.png, {'tumour' if n % 2 else 'benign'}, {'train' if n < 4 else 'val'}\n"
            for n in range(6)
        )
        path = self.table(files, "file, label, split\n" + rows)
        dataset = opened(files, labels_path=str(path))
        assert [dataset.path("train", index).name for index in range(4)] == [
            f"{number}.png" for number in range(4)
        ]
        assert [dataset.label("train", index) for index in range(4)] == [0, 1, 0, 1]
        assert dataset.num_validation == 2

    def test_numbers_stand_for_themselves(self, files: Path) -> None:
        path = self.table(files, "file,label\n" + "".join(f"{n}.png,{n % 2}\n" for n in range(6)))
        dataset = opened(files, labels_path=str(path), num_classes=3)
        found = np.add(dataset.class_counts("train"), dataset.class_counts("validation"))
        assert found.tolist() == [3, 3, 0]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("file,label\n0.png,a\n1.png,b\n2.png,c\n", "the table has 3 classes (a, b, c)"),
            ("file,class\n0.png,a\n", "has no column label"),
            ("file,label,split\n0.png,a,train\n1.png,b,dev\n", "line 3 names a split 'dev'"),
            ("file,label\n0.png\n", "line 2 has too few cells"),
            ("file,label\n", "has no rows"),
            ("file,label\n0.png,a\n1.png,a\n2.png,b\n7.png,b\n", "7.png"),
        ],
    )
    def test_that_is_refused(self, files: Path, text: str, words: str) -> None:
        assert words in str(refused(files, labels_path=str(self.table(files, text))))

"""A folder of images: both layouts, and each fault named before the first step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gems.config.schema import DataConfig
from gems.data import Split, check_data, open_dataset
from gems.data.folder import FolderDataset
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
    dataset = open_dataset(folder_data(root, **changes), seed)
    assert isinstance(dataset, FolderDataset)
    return dataset


def refused(root: Path, **changes: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        open_dataset(folder_data(root, **changes), 0)
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
    first, again, other = opened(tmp_path, 0), opened(tmp_path, 0), opened(tmp_path, 5)
    assert first.class_counts("train") == (8, 8)
    assert first.class_counts("validation") == (2, 2)
    held_out = [{data.path("validation", index) for index in range(4)} for data in (first, again, other)]
    trained = {first.path("train", index) for index in range(16)}
    assert held_out[0] == held_out[1] != held_out[2]
    assert not held_out[0] & trained
    assert len(held_out[0] | trained) == 20


def test_the_share_of_validation_follows_the_two_counts(tmp_path: Path) -> None:
    dataset = opened(fill(tmp_path, 10), train_samples=50, validation_samples=50)
    assert dataset.class_counts("validation") == (5, 5)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
@pytest.mark.parametrize("stored", ["L", "RGB", "RGBA", "P", "1", "I;16"])
def test_any_stored_mode_gives_the_configured_channels(tmp_path: Path, channels: int, mode: str, stored: str) -> None:
    fill(tmp_path)
    noise_file(tmp_path / "alpha" / "0.png")
    with Image.open(tmp_path / "alpha" / "0.png") as picture:
        if stored == "I;16":
            picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
        else:
            picture = picture.convert(stored)
    picture.save(tmp_path / "alpha" / "0.png")
    dataset = opened(tmp_path, channels=channels, height_px=64, width_px=64, augment=False)
    splits: tuple[Split, Split] = ("train", "validation")
    places = [(split, index) for split in splits for index in range(dataset.num_images(split))]
    (place,) = [place for place in places if dataset.path(*place) == tmp_path / "alpha" / "0.png"]
    image = dataset.image(*place)
    assert image.shape == (channels, 64, 64)
    if stored == "I;16":
        expected = np.asarray(picture).astype(np.float32) // 256
        assert np.allclose(image[0], (expected - 127.5) / 64)
    else:
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


@pytest.mark.parametrize("path", [None, "nowhere"])
def test_a_missing_folder_is_named(tmp_path: Path, path: str | None) -> None:
    data = DataConfig(name="folder", path=path and str(tmp_path / path))
    for check in (check_data, lambda data: open_dataset(data, 0)):
        with pytest.raises(ConfigError) as caught:
            check(data)
        assert caught.value.key == "data.path"
    if path:
        assert str(tmp_path / path) in str(caught.value)


def test_another_number_of_classes_is_refused_without_opening_a_file(tmp_path: Path) -> None:
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(b"not an image, never opened")
    with pytest.raises(ConfigError) as caught:
        check_data(folder_data(tmp_path))
    assert caught.value.key == "data.num_classes"
    assert "3 classes (alpha, beta, gamma)" in str(caught.value)
    assert "data.num_classes=3" in str(caught.value)
    check_data(folder_data(tmp_path, num_classes=3))


def test_an_empty_folder_tells_the_layout(tmp_path: Path) -> None:
    assert "PATH/train/CLASS/*" in str(refused(tmp_path))


def test_half_a_split_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    assert "train/ but not the other split" in str(refused(tmp_path))


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
def test_a_bad_file_is_named_when_the_folder_is_opened(tmp_path: Path, suffix: str, fault: str) -> None:
    fill(tmp_path, suffix=suffix)
    opened(tmp_path)
    bad = noise_file(tmp_path / "beta" / f"3.{suffix}")
    opened(tmp_path)
    whole = bad.read_bytes()
    bad.write_bytes({"truncated": whole[: len(whole) * 2 // 3], "empty": b"", "text": b"image, 1\n" * 50}[fault])
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
    Image.fromarray(np.zeros((8, 8), dtype=np.float32)).save(tmp_path / "alpha" / "1.tif")
    assert "mode F" in str(refused(tmp_path))


def test_hidden_files_are_no_images(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "alpha" / ".listing").write_text("x")
    (tmp_path / ".cache").mkdir()
    assert opened(tmp_path).num_classes == 2


def test_an_image_beyond_pillows_limit_is_welcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert opened(fill(tmp_path)).image("train", 0).shape == (3, 8, 16)


def test_other_channels_are_refused(tmp_path: Path) -> None:
    assert refused(fill(tmp_path), channels=2).key == "data.channels"

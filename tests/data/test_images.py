"""Images of files: what would be misread is refused; normalisation and transforms against numpy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from gems.config.compose import compose
from gems.config.schema import DataConfig
from gems.data import check_data, open_dataset
from gems.data.files.reader import read_image, read_mask
from gems.data.images import ImageDataset
from gems.data.inspection import inspect_data
from gems.errors import ConfigError
from gems.runs.prepare import prepare

SIDE = 8


def data_of(root: Path, **changes: Any) -> DataConfig:
    fields = {"name": "folder", "path": str(root), "height_px": SIDE, "width_px": SIDE, **changes}
    return DataConfig(**fields)


def noise(seed: int, *shape: int, dtype: Any = np.uint8, below: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=dtype)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "tiles" / name).mkdir(parents=True)
        for number in range(4):
            pixels = noise(number + 10 * (name == "b"), SIDE, SIDE, 3)
            Image.fromarray(pixels).save(tmp_path / "tiles" / name / f"{number}.png")
    return tmp_path / "tiles"


def opened(root: Path, **changes: Any) -> ImageDataset:
    dataset = open_dataset(data_of(root, **{"augment": False} | changes), 0)
    assert isinstance(dataset, ImageDataset)
    return dataset


def stored(dataset: ImageDataset, split: Any, index: int) -> np.ndarray:
    """The bytes of an image as shares of their range, read by Pillow alone."""
    return (
        np.asarray(Image.open(dataset.name_of(split, index)), dtype=np.float64).transpose(2, 0, 1)
        / 255
    )


class TestMisread:
    def refused(self, path: Path, **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            read_image(path, data_of(path.parent, **changes))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    def test_sixteen_bits_need_to_be_said(self, tmp_path: Path) -> None:
        values = noise(0, SIDE, SIDE, dtype=np.uint16, below=4096)
        for suffix in ("png", "tif"):
            path = tmp_path / f"x.{suffix}"
            Image.fromarray(values).save(path)
            assert "data.bits=null" in self.refused(path, channels=1)
            found = read_image(path, data_of(tmp_path, channels=1, bits=12))
            assert found.dtype == np.uint16
            np.testing.assert_array_equal(found[0], values)
            assert "has the value" in self.refused(path, channels=1, bits=11)
            assert "1 channel" in self.refused(path, channels=3, bits=12)

    def test_five_channels_of_sixteen_bits(self, tmp_path: Path) -> None:
        """A TIFF file of a fluorescence microscope.

        Channels last, apart, or of twice the size that is wanted.
        """
        values = np.random.default_rng(1).integers(4096, size=(5, SIDE, SIDE), dtype=np.uint16)
        even = (
            np.ones((5, 2 * SIDE, 2 * SIDE), np.uint16)
            * np.arange(5, dtype=np.uint16)[:, None, None]
        )
        for number, (pixels, planar, expected) in enumerate(
            (
                (values.transpose(1, 2, 0), "contig", values),
                (values, "separate", values),
                (even, "separate", even[:, ::2, ::2]),
            )
        ):
            path = tmp_path / f"{number}.tif"
            tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig=planar)
            np.testing.assert_array_equal(
                read_image(path, data_of(tmp_path, channels=5, bits=12)), expected
            )
            assert "data.bits=null" in self.refused(path, channels=5)
            assert "set data.channels=5" in self.refused(path, channels=6, bits=12)
        Image.fromarray(noise(0, SIDE, SIDE)).save(tmp_path / "x.png")
        assert "is no TIFF file; use TIFF files, or 1 (grey)" in self.refused(
            tmp_path / "x.png", channels=5
        )

    def test_bytes_are_no_twelve_bits(self, tmp_path: Path) -> None:
        Image.fromarray(noise(0, SIDE, SIDE)).save(tmp_path / "x.png")
        assert "data.bits=12" in self.refused(tmp_path / "x.png", channels=1, bits=12)

    def test_sixteen_bits_in_colour_are_not_cut_to_eight(self, tmp_path: Path) -> None:
        import struct
        import zlib

        def chunk(kind: bytes, body: bytes) -> bytes:
            return (
                struct.pack(">I", len(body))
                + kind
                + body
                + struct.pack(">I", zlib.crc32(kind + body))
            )

        rows = b"".join(
            b"\0" + noise(y, SIDE * 3, dtype=np.uint16, below=65536).tobytes() for y in range(SIDE)
        )
        head = struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0)
        body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
        (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
        assert "16 bits a channel in colour" in self.refused(tmp_path / "x.png")
        tifffile = pytest.importorskip("tifffile")
        tifffile.imwrite(
            tmp_path / "x.tif", noise(0, SIDE, SIDE, 3, dtype=np.uint16), photometric="rgb"
        )
        self.refused(tmp_path / "x.tif")

    def test_the_page_is_said(self, tmp_path: Path) -> None:
        pages = [Image.fromarray(noise(number, SIDE, SIDE, 3)) for number in range(5)]
        pages[0].save(tmp_path / "x.tif", save_all=True, append_images=pages[1:])
        assert "has 5 pages; set data.page=0 to 4" in self.refused(tmp_path / "x.tif")
        assert "has 5 pages; count from 0" in self.refused(tmp_path / "x.tif", page=5)
        found = read_image(tmp_path / "x.tif", data_of(tmp_path, page=3))
        np.testing.assert_array_equal(found, noise(3, SIDE, SIDE, 3).transpose(2, 0, 1))

    def test_transparency_is_not_dropped(self, tmp_path: Path) -> None:
        pixels = noise(0, SIDE, SIDE, 4)
        Image.fromarray(pixels).save(tmp_path / "x.png")
        assert "is transparent in places" in self.refused(tmp_path / "x.png")
        np.testing.assert_array_equal(
            read_image(tmp_path / "x.png", data_of(tmp_path, channels=4))[3], pixels[..., 3]
        )
        pixels[..., 3] = 255
        Image.fromarray(pixels).save(tmp_path / "x.png")
        np.testing.assert_array_equal(
            read_image(tmp_path / "x.png", data_of(tmp_path))[2], pixels[..., 2]
        )

    def test_inks_are_no_colours(self, tmp_path: Path) -> None:
        Image.fromarray(noise(0, SIDE, SIDE, 4), mode="CMYK").save(tmp_path / "x.jpg")
        assert "CMYK, which would be misread" in self.refused(tmp_path / "x.jpg")

    def test_a_mask_keeps_the_indices_of_its_palette_and_has_no_colours(
        self, tmp_path: Path
    ) -> None:
        classes = noise(0, SIDE, SIDE, below=5)
        picture = Image.fromarray(classes, mode="P")
        picture.putpalette(noise(1, 768).tolist())
        picture.save(tmp_path / "x.png")
        np.testing.assert_array_equal(
            read_mask(tmp_path / "x.png", data_of(tmp_path), tmp_path / "x.png"), classes
        )
        Image.fromarray(noise(0, SIDE, SIDE, 3)).save(tmp_path / "y.png")
        with pytest.raises(ConfigError, match="has colours"):
            read_mask(tmp_path / "y.png", data_of(tmp_path), tmp_path / "y.png")


class TestNormalization:
    @pytest.mark.parametrize(
        ("changes", "mean", "std"),
        [
            ({}, [127.5 / 255] * 3, [64 / 255] * 3),
            ({"normalization": "imagenet"}, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ({"normalization": "none"}, [0] * 3, [1] * 3),
            ({"mean": [0.5], "std": [0.1, 0.2, 0.3]}, [0.5] * 3, [0.1, 0.2, 0.3]),
        ],
    )
    def test_by_name_or_number(
        self, root: Path, changes: dict[str, Any], mean: Any, std: Any
    ) -> None:
        dataset = opened(root, **changes)
        expected = (stored(dataset, "train", 1) - np.reshape(mean, (3, 1, 1))) / np.reshape(
            std, (3, 1, 1)
        )
        np.testing.assert_allclose(dataset.image("train", 1), expected, atol=2e-6)

    def test_computed_over_the_training_split_once(self, root: Path, cache: Path) -> None:
        dataset = opened(root, normalization="computed")
        images = np.stack(
            [dataset.image("train", index) for index in range(dataset.num_train)]
        ).astype(np.float64)
        np.testing.assert_allclose(images.mean((0, 2, 3)), 0, atol=1e-5)
        np.testing.assert_allclose(images.std((0, 2, 3)), 1, atol=1e-5)
        (kept,) = cache.glob("normalization-*")
        kept.write_text('{"mean": [0, 0, 0], "std": [2, 2, 2]}')
        again = opened(root, normalization="computed")
        np.testing.assert_allclose(
            again.image("train", 0), stored(again, "train", 0) / 2, atol=1e-6
        )
        Image.fromarray(noise(99, SIDE, SIDE, 3)).save(again.name_of("train", 0))
        changed = opened(root, normalization="computed")
        assert changed.image("train", 0).std() > 0.8  # computed anew

    def test_wider_values_by_their_range(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            for number in range(2):
                values = noise(number, SIDE, SIDE, dtype=np.uint16, below=4096)
                Image.fromarray(values).save(tmp_path / name / f"{number}.png")
        dataset = opened(tmp_path, channels=1, bits=12, normalization="none")
        share = np.asarray(Image.open(dataset.name_of("train", 0))) / 4095
        np.testing.assert_allclose(dataset.image("train", 0)[0], share, atol=1e-6)

    @pytest.mark.parametrize(
        ("changes", "key"),
        [
            ({"mean": [0.5, 0.5]}, "data.mean"),
            ({"normalization": "imagenet", "channels": 1}, "data.normalization"),
            ({"std": [0.0]}, "data.std[0]"),
            ({"transform_kwargs": {"p": 1}}, "data.transform_kwargs"),
            ({"name": "tissue", "normalization": "imagenet"}, "data.normalization"),
            ({"name": "synthetic", "bits": 12}, "data.bits"),
        ],
    )
    def test_that_does_not_fit(self, root: Path, changes: dict[str, Any], key: str) -> None:
        with pytest.raises(ConfigError) as caught:
            check_data(data_of(root, **changes))
        assert caught.value.key == key


def shifted(image: Any, mask: Any = None) -> Any:
    """A transform of one's own: a random shift of columns."""
    import torch

    by = int(torch.randint(1, SIDE, ()))
    return image.roll(by, -1) if mask is None else (image.roll(by, -1), mask.roll(by, -1))


def scaled(image: Any) -> Any:
    return image.float() / 255


class TestTransforms:
    def test_of_torchvision(self, root: Path, torchvision: Any) -> None:
        name = "torchvision.transforms.v2.RandomHorizontalFlip"
        plain = opened(root)
        dataset = opened(root, augment=True, transform=name, transform_kwargs={"p": 1.0})
        np.testing.assert_array_equal(
            dataset.image("train", 2), plain.image("train", 2)[:, :, ::-1]
        )
        np.testing.assert_array_equal(dataset.image("validation", 1), plain.image("validation", 1))

    def test_of_albumentations(self, root: Path) -> None:
        pytest.importorskip("albumentations")
        plain = opened(root)
        kwargs = {
            "transform": "albumentations.RandomCrop",
            "transform_kwargs": {"height": 8, "width": 8},
        }
        np.testing.assert_array_equal(
            opened(root, **kwargs).image("train", 0), plain.image("train", 0)
        )
        turned = [
            opened(root, transform="albumentations.D4").image("train", 0, draw)
            for draw in (0, 1, 2, 3, 4, 0)
        ]
        np.testing.assert_array_equal(turned[0], turned[-1])
        assert len({each.tobytes() for each in turned}) > 1
        assert all(
            np.array_equal(np.sort(each, None), np.sort(plain.image("train", 0), None))
            for each in turned
        )

    def test_of_ones_own_are_drawn_by_sample_and_epoch(self, root: Path) -> None:
        plain = opened(root)
        dataset = opened(root, transform=f"{__name__}.shifted")
        drawn = [dataset.image("train", 0, draw) for draw in range(6)]
        shifts = {
            by
            for each in drawn
            for by in range(SIDE)
            if np.array_equal(each, np.roll(plain.image("train", 0), by, -1))
        }
        assert len(shifts) > 1 and 0 not in shifts
        np.testing.assert_array_equal(drawn[3], dataset.image("train", 0, 3))
        assert dataset.seeds_process

    def test_that_is_refused(self, root: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"gives values of type float32 for uint8; leave the scaling"
        ):
            opened(root, transform=f"{__name__}.scaled").image("train", 0)
        with pytest.raises(ConfigError, match=r"fails for .*png"):
            opened(root, transform="math.sqrt").image("train", 0)

    def test_without_its_library(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torchvision", None)
        monkeypatch.setattr("gems.data.images.find_spec", lambda name: None)
        with pytest.raises(
            ConfigError,
            match=r"needs torchvision, which is not installed; pip install gems-train\[vision\]",
        ):
            check_data(data_of(root, transform="torchvision.transforms.v2.RandomCrop"))


def test_what_was_inspected_is_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_data(data_of(root), 0)
    with monkeypatch.context() as patched:
        patched.setattr("gems.data.inspection._examine", lambda *_: pytest.fail("read again"))
        inspect_data(data_of(root), 0)
    (root / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match="not a readable image"):
        inspect_data(data_of(root), 0)


def test_a_single_image_is_decoded_into_one_array(root: Path) -> None:
    """The batch of one image is that image's own memory."""
    dataset = opened(root)
    images, labels = dataset.batch("train", np.array([[0, 0]]))
    assert images is not None and labels is not None
    assert images.base is not None and images.shape == (1, 3, SIDE, SIDE) and labels.shape == (1,)


def test_a_run_with_a_bad_file_gets_no_folder(root: Path, tmp_path: Path) -> None:
    """It is refused where it is prepared, before anything is queued."""
    (root / "b" / "3.png").write_bytes(b"no image")
    words = [
        "data=folder",
        f"data.path={root}",
        "parallel.partitions=1",
        f"runs_dir={tmp_path / 'runs'}",
    ]
    with pytest.raises(ConfigError, match=r"b/3\.png: not a readable image"):
        prepare(compose(words))
    assert not (tmp_path / "runs").exists()

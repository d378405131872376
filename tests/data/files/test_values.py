"""Values that would be trained on wrongly: out of range, not finite, or of no data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import torch

from gems.config.schema import DataConfig
from gems.data import check_data
from gems.data.files.values import checked, fitted, is_nodata
from gems.errors import ConfigError
from tests.helpers.file_data import SIDE, data_of, opened, refused

pytestmark = pytest.mark.cases


def floats(count: int = 6) -> np.ndarray:
    return np.random.default_rng(0).random((count, SIDE, SIDE, 3)).astype(np.float32)


def write(path: Path, images: np.ndarray, **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        file["images"], file["labels"] = images, np.arange(len(images)) % 2
        file["images"].attrs.update(attributes)
    return path


def with_gap(root: Path, nodata: str | None) -> Path:
    """Images of 16 bits whose first two rows hold 65535."""
    for kind in "ab":
        (root / kind).mkdir(parents=True)
        for number in range(3):
            values = np.random.default_rng(number).integers(
                1000, 60000, (SIDE, SIDE, 3), dtype=np.uint16
            )
            values[:2] = 65535
            tags = [(42113, "s", 0, nodata, True)] if nodata else []
            tifffile.imwrite(
                root / kind / f"{number}.tif", values, photometric="rgb", extratags=tags
            )
    return root


def upside_down(image: torch.Tensor) -> torch.Tensor:
    return image.flip(1)


class TestRange:
    def test_floats_beyond_their_range_are_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "ct.h5", floats() * 4000 - 1000)
        for normalization in ("fixed", "imagenet", "none"):
            said = refused("hdf5", path, normalization=normalization)
            assert said.startswith(
                f"data.normalization={normalization}: takes floats from 0 to 1, and {path}:images["
            )
            assert (
                "has values from -9" in said
                and "set data.normalization=computed, or data.mean" in said
            )
        found = opened("hdf5", path, normalization="computed").image("train", 0)
        assert abs(float(np.mean(found))) < 1 and float(np.abs(found).max()) < 4
        assert opened("hdf5", path, mean=[1000.0], std=[1000.0]).image("train", 0).shape == (
            3,
            SIDE,
            SIDE,
        )

    def test_one_image_of_many_is_found(self, tmp_path: Path) -> None:
        images = floats(9)
        images[7, 3, 4, 0] = 255
        assert "images[7] has values from" in refused("hdf5", write(tmp_path / "a.h5", images))

    def test_of_parts_too(self) -> None:
        values = floats(1)[0].transpose(2, 0, 1)
        data = DataConfig(name="hdf5", height_px=SIDE, width_px=SIDE)
        assert checked(values, data, "x") is values
        assert checked(values + np.float32(5e-4), data, "x") is not None
        with pytest.raises(ConfigError, match="takes floats from 0 to 1, and x has values"):
            checked(values * 255, data, "x")


class TestNotFinite:
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("normalization", ["fixed", "computed"])
    def test_is_refused_by_file_and_place(
        self, tmp_path: Path, value: float, normalization: str
    ) -> None:
        images = floats()
        images[4, 5, 6, 2] = value
        said = refused("hdf5", write(tmp_path / "a.h5", images), normalization=normalization)
        assert f"{tmp_path}/a.h5:images[4]: has 1 values that are not finite" in said
        assert f"the first ({value}) in row 5, column 6" in said

    def test_in_a_tiff_file(self, tmp_path: Path) -> None:
        for kind in "ab":
            (tmp_path / kind).mkdir()
            for number in range(3):
                tifffile.imwrite(tmp_path / kind / f"{number}.tif", floats(1)[0], photometric="rgb")
        assert opened("folder", tmp_path).image("train", 0).dtype == np.float32
        bad = floats(1)[0]
        bad[1, 2] = np.nan
        tifffile.imwrite(tmp_path / "b" / "1.tif", bad, photometric="rgb")
        assert (
            "b/1.tif: has 3 values that are not finite, the first (nan) in row 1, column 2"
            in refused("folder", tmp_path)
        )


class TestNoData:
    @pytest.mark.parametrize("said", ["by the tag", "by the key"])
    def test_is_zero_and_not_in_the_statistics(self, tmp_path: Path, said: str) -> None:
        root = with_gap(tmp_path / "x", "65535" if said == "by the tag" else None)
        changes: dict[str, Any] = {"bits": 16} | ({} if said == "by the tag" else {"nodata": 65535})
        for normalization in ("fixed", "computed"):
            dataset = opened("folder", root, normalization=normalization, **changes)
            images = np.stack(
                [np.asarray(dataset.image("train", index)) for index in range(dataset.num_train)]
            )
            assert (images[:, :, :2] == 0).all() and (images[:, :, 2:] != 0).mean() > 0.99
            if normalization == "computed":
                np.testing.assert_allclose(images[:, :, 2:].mean((0, 2, 3)), 0, atol=1e-5)
                np.testing.assert_allclose(images[:, :, 2:].std((0, 2, 3)), 1, atol=1e-5)
            np.testing.assert_array_equal(dataset.rows("train", 0, 0, 1, 5), images[0][:, 1:5])

    def test_is_zero_after_a_transform(self, tmp_path: Path) -> None:
        root = with_gap(tmp_path / "x", "65535")
        target = f"{__name__}.upside_down"
        dataset = opened("folder", root, bits=16, normalization="computed", transform=target)
        for index in range(dataset.num_train):
            image = np.asarray(dataset.image("train", index))
            assert (image[:, -2:] == 0).all() and (image[:, :-2] != 0).mean() > 0.99

    def test_is_not_mixed_with_data(self, tmp_path: Path) -> None:
        dataset = opened(
            "folder", with_gap(tmp_path / "x", "65535"), bits=16, height_px=6, width_px=6
        )
        for index in range(dataset.num_train):
            image = np.asarray(dataset.image("train", index))
            assert (image[:, :2] == 0).all() and image.max() < 2  # 65535 would be 1.99

    def test_of_hdf5_is_its_attribute(self, tmp_path: Path) -> None:
        images = floats() * 0.8 + 0.1
        images[:, :3] = -9999
        dataset = opened("hdf5", write(tmp_path / "a.h5", images, _FillValue=np.float32(-9999)))
        assert (np.asarray(dataset.image("train", 0))[:, :3] == 0).all()
        images[:, :3] = np.nan
        dataset = opened("hdf5", write(tmp_path / "b.h5", images), nodata="nan")
        assert (np.asarray(dataset.image("train", 0))[:, :3] == 0).all()
        assert np.isfinite(np.asarray(dataset.image("train", 0))).all()

    def test_is_ignored_in_masks(self, tmp_path: Path) -> None:
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir()
        for path in sorted(with_gap(tmp_path / "x", "65535").glob("a/*")):
            path.rename(tmp_path / "images" / path.name)
            mask = np.ones((SIDE, SIDE), np.uint8)
            mask[5] = 200
            tifffile.imwrite(
                tmp_path / "masks" / path.name, mask, extratags=[(42113, "s", 0, "200", True)]
            )
        dataset = opened("masks", tmp_path, bits=16)
        label = np.asarray(dataset.label("train", 0))
        expected = np.ones((SIDE, SIDE))
        expected[[0, 1, 5]] = -1
        np.testing.assert_array_equal(label, expected)
        assert dataset.class_counts("validation") == (0, 5 * SIDE)

    def test_of_the_lowest_float_is_known_by_some_digits(self) -> None:
        lowest = np.array([np.finfo(np.float32).min, 1], np.float32)
        assert is_nodata(lowest, -3.40282e38).tolist() == [True, False]
        assert is_nodata(np.array([0, 255], np.uint8), -9999.0).tolist() == [False, False]
        assert is_nodata(np.array([math.nan, 1]), math.nan).tolist() == [True, False]
        values = np.full((1, 4, 4), 7, np.uint8)
        assert fitted(
            values, DataConfig(channels=1, height_px=2, width_px=2), "x", 7.0
        ).tolist() == [[[7, 7]] * 2]

    def test_of_a_word_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="must be a number, or nan"):
            check_data(data_of("folder", tmp_path, nodata="none"))


def test_wide_values_of_either_order_of_bytes_are_checked(tmp_path: Path) -> None:
    for order in "<>":
        values = np.full((SIDE, SIDE), 4096, f"{order}u2")
        with pytest.raises(ConfigError, match=r"has the value 4096; set data\.bits=16"):
            checked(values[np.newaxis], DataConfig(channels=1, bits=12), "x")
        with pytest.raises(ConfigError, match=r"has values of 16 bits"):
            checked(values[np.newaxis], DataConfig(channels=1), "x")

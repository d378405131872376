"""TIFF files of 16 bits, several pages and planes: against the arrays that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from gems.config.schema import DataConfig
from gems.data.files.reader import read_image
from gems.data.files.tiff import read_tiff
from gems.errors import ConfigError

VALUES = np.random.default_rng(0).integers(0, 4096, (3, 8, 12), dtype=np.uint16)


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_colours_of_16_bits(tmp_path: Path, planar: Any) -> None:
    given = VALUES if planar == "separate" else VALUES.transpose(1, 2, 0)
    tifffile.imwrite(tmp_path / "a.tif", given, photometric="rgb", planarconfig=planar)
    np.testing.assert_array_equal(read_tiff(tmp_path / "a.tif", None, 3), VALUES)
    data = DataConfig(name="folder", height_px=8, width_px=12, bits=12)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", data), VALUES)


def test_a_page_is_chosen(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", VALUES, photometric="minisblack")
    for page in range(3):
        np.testing.assert_array_equal(
            read_tiff(tmp_path / "a.tif", page, 1), VALUES[page : page + 1]
        )


@pytest.mark.parametrize(
    ("options", "page", "channels", "key", "words"),
    [
        ({"photometric": "minisblack"}, None, 1, "data.page", "has 3 pages"),
        ({"photometric": "minisblack"}, 3, 1, "data.page", "count from 0"),
        (
            {"photometric": "rgb", "planarconfig": "separate"},
            None,
            1,
            "data.channels",
            "set data.channels=3",
        ),
        ({"photometric": "miniswhite"}, 0, 1, "data.path", "counts from white"),
        (
            {"photometric": "minisblack", "extratags": [(274, 3, 1, 6, True)]},
            0,
            1,
            "data.path",
            "orientation 6",
        ),
    ],
)
def test_what_would_be_misread(
    tmp_path: Path, options: dict[str, Any], page: int | None, channels: int, key: str, words: str
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", VALUES, **options)
    with pytest.raises(ConfigError, match=words) as caught:
        read_tiff(tmp_path / "a.tif", page, channels)
    assert caught.value.key == key


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(b"II*\0")
    with pytest.raises(ConfigError, match="not a readable image"):
        read_tiff(tmp_path / "a.tif", None, 3)

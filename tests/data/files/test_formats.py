"""Sound files of formats that are read only by some libraries, or not at all: read, or named."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from gems.config.schema import DataConfig
from gems.data.files.reader import check_header, read_image, read_through
from gems.errors import ConfigError

SIDE = 32
DATA = DataConfig(name="folder", height_px=SIDE, width_px=SIDE)
PIXELS = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
pytestmark = pytest.mark.cases


def refused(path: Path, data: DataConfig = DATA) -> str:
    said = set()
    for read in (check_header, read_through, read_image):
        with pytest.raises(ConfigError) as caught:
            read(path, data)
        said.add(str(caught.value))
    assert len(said) == 1 and str(path) in str(caught.value) and "\n" not in str(caught.value)
    return said.pop()


@pytest.mark.parametrize("compression", ["jpeg2000", "webp", "zstd"])
def test_compressions_of_tiff_are_read(tmp_path: Path, compression: str) -> None:
    pytest.importorskip("imagecodecs")
    kwargs: Any = {"compressionargs": {"lossless": True}} if compression == "webp" else {}
    tifffile.imwrite(
        tmp_path / "a.tif",
        PIXELS,
        photometric="rgb",
        tile=(16, 16),
        compression=compression,
        **kwargs,
    )
    read_through(tmp_path / "a.tif", DATA)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", DATA), PIXELS.transpose(2, 0, 1))


def test_a_compression_that_no_library_reads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imagecodecs")
    tifffile.imwrite(tmp_path / "a.tif", PIXELS, photometric="rgb", compression="jpeg2000")
    monkeypatch.setitem(tifffile.TIFF.__dict__, "DECOMPRESSORS", {})
    with pytest.raises(
        ConfigError, match=r"compressed by JPEG2000, which no .*; pip install imagecodecs"
    ):
        read_through(tmp_path / "a.tif", DATA)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_tiff_of_floats_is_read(tmp_path: Path, dtype: str) -> None:
    values = (PIXELS / 255).astype(dtype)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="rgb")
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", DATA), values.transpose(2, 0, 1))
    tifffile.imwrite(tmp_path / "grey.tif", values[..., 0])
    grey = DataConfig(name="folder", height_px=SIDE, width_px=SIDE, channels=1)
    np.testing.assert_array_equal(read_image(tmp_path / "grey.tif", grey)[0], values[..., 0])


def test_other_formats_are_named(tmp_path: Path) -> None:
    nifti = bytearray(400)
    nifti[344:348] = b"n+1\0"
    files = {
        "a.nii": (bytes(nifti), "NIfTI"),
        "b.nii.gz": (gzip.compress(bytes(nifti)), "NIfTI (.nii.gz)"),
        "c.dcm": (bytes(128) + b"DICM" + bytes(100), "DICOM"),
        "d.png": (b"\x93NUMPY\1\0" + bytes(100), "NumPy (.npy)"),
        "e.tif": (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        "f.jpg": (b"<!DOCTYPE html><p>", "a web page (HTML)"),
        "g.png": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        "h.mha": (b"ObjectType = Image\n", "MetaImage"),
        "i.exr": (b"v/1\x01" + bytes(50), "OpenEXR"),
        "j.npz": (b"PK\x03\x04" + bytes(50), "NumPy (.npz)"),
        "k.zip": (b"PK\x03\x04" + bytes(50), "a ZIP archive"),
    }
    for name, (head, expected) in files.items():
        (tmp_path / name).write_bytes(head)
        said = refused(tmp_path / name)
        assert f"not a readable image: it is {expected}, which is not read here" in said
        assert "repair or remove" not in said
    assert refused(tmp_path / "a.nii").endswith("or read it by a dataset of your own, data.target")
    assert "use data=hdf5" in refused(tmp_path / "e.tif")


def test_a_chunk_of_zarr_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / ".zarray").write_text("{}")
    (tmp_path / "x.zarr" / "0.0").write_bytes(bytes(100))
    assert "it is Zarr" in refused(tmp_path / "x.zarr" / "0.0")


def test_a_bad_file_is_still_to_be_repaired(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    assert refused(tmp_path / "a.png").endswith("repair or remove the file")

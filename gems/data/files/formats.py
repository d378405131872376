"""File formats by their first bytes, to name the format of a file that no image reader accepts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gems.errors import ConfigError

_HEAD_BYTES = 1024
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# (offset, bytes, format), the more specific first
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (344, b"n+1\0", "NIfTI"),
    (344, b"ni1\0", "NIfTI"),
    (4, b"n+2\0\r\n", "NIfTI"),
    (128, b"DICM", "DICOM"),
    (0, b"\x93NUMPY", "NumPy (.npy)"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (0, b"CDF\x01", "NetCDF"),
    (0, b"CDF\x02", "NetCDF"),
    (0, b"CDF\x05", "NetCDF"),
    (0, b"MATLAB 5.0", "MATLAB"),
    (0, b"NRRD000", "NRRD"),
    (0, b"ObjectType", "MetaImage"),
    (0, b"SIMPLE  =", "FITS"),
    (0, b"v/1\x01", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"),
    (0, b"ZISRAWFILE", "CZI"),
    (0, b"\xda\xce\xbe\x0a", "ND2"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL \r\n", "JPEG XL"),
    (0, b"II\xbc\x01", "JPEG XR"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypheic", "HEIC"),
    (4, b"ftypheix", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftyp", "a video (MP4)"),
    (8, b"AVI ", "a video (AVI)"),
    (0, b"\x1aE\xdf\xa3", "a video (Matroska)"),
    (0, b"%PDF", "PDF"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "XML"),
    (0, b"<!DOCTYPE html", "a web page (HTML)"),
    (0, b"<html", "a web page (HTML)"),
    (0, b"PAR1", "Parquet"),
    (0, b"SQLite format 3", "SQLite"),
    (0, b"version https://git-lfs", "a pointer of Git LFS"),
    (0, b"\x28\xb5\x2f\xfd", "Zstandard"),
    (0, b"BZh", "bzip2"),
    (0, b"\xfd7zXZ", "xz"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x80\x02", "a pickle"),
    (0, b"\x80\x04", "a pickle"),
    (0, b"\x80\x05", "a pickle"),
)
# by the end of the file name, if the first bytes only reveal how the file was packed
_ENDINGS = (
    (".nii.gz", "NIfTI (.nii.gz)"),
    (".npz", "NumPy (.npz)"),
    (".pt", "a file of torch"),
    (".pth", "a file of torch"),
    (".img", "Analyze or NIfTI (.img)"),
)
_PACKED = ("gzip", "a ZIP archive")
_ZARR = (".zarray", ".zgroup", "zarr.json")
_ADVICE = "convert it to TIFF or PNG, or read it by a dataset of your own, data.target"
_ADVICE_OF = {
    "HDF5": "use data=hdf5, or read it by a dataset of your own, data.target",
    "a pointer of Git LFS": "get the file itself: git lfs pull",
    "a web page (HTML)": "it may be what a failed download left; get the file again",
}


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file, or no bytes if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def is_tiff(path: Path) -> bool:
    """Return whether a file is a TIFF file according to its first bytes."""
    return head_of(path).startswith(_TIFF)


def format_of(path: Path) -> str | None:
    """Return the name of a file's format if it is known and is not an image format."""
    if any((folder / mark).exists() for folder in path.parents[:4] for mark in _ZARR):
        return "Zarr"
    head = head_of(path)
    format = next(
        (name for start, magic, name in _MAGIC if head[start : start + len(magic)] == magic), None
    )
    if format in _PACKED:
        return next(
            (name for ending, name in _ENDINGS if path.name.lower().endswith(ending)), format
        )
    return format


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise errors of the readers in the context as ConfigError, which names the format if known."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if format := format_of(path):
            text = f"not a readable image: it is {format}, which is not read here"
            raise ConfigError("data.path", path, text, _ADVICE_OF.get(format, _ADVICE)) from error
        text = f"not a readable image: {' '.join(str(error).split()) or type(error).__name__}"
        raise ConfigError("data.path", path, text, "repair or remove the file") from error

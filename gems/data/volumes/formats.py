"""Open NIfTI files, DICOM series and Zarr arrays as stored volumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gems.config.schema import DataConfig
from gems.data.files.formats import head_of, readable
from gems.data.files.paths import is_left_over
from gems.data.files.values import Values
from gems.data.volumes.stored import StoredVolume, needs, turned_axes
from gems.errors import ConfigError

NIFTI = (".nii", ".nii.gz")
MARKS = ("zarr.json", ".zarray", ".zgroup")
SUFFIXES = (".nii.gz", ".nii", ".ome.zarr", ".zarr", ".dcm")
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])
_GAP = 0.01  # by which distances of slices may differ


def volumes_below(folder: Path) -> dict[str, Path]:
    """Return the volumes of a folder by name: NIfTI files, Zarr folders, folders of DICOM slices.

    Raises:
        ConfigError: A file is none of these.
    """
    volumes: dict[str, Path] = {}

    def look(path: Path) -> None:
        if is_left_over(path.name):
            return
        entries = sorted(path.iterdir()) if path.is_dir() else []
        files = [each for each in entries if each.is_file() and not is_left_over(each.name)]
        is_zarr = any((path / mark).exists() for mark in MARKS)
        if path.name.lower().endswith(NIFTI) or is_zarr or (files and all(map(is_dicom, files))):
            volumes[_name(path, folder)] = path
        elif path.is_file():
            text = f"{path} is no NIfTI file, Zarr folder or folder of DICOM slices"
            raise ConfigError("data.path", folder, text, "convert or remove it")
        for entry in [] if volumes.get(_name(path, folder)) == path else entries:
            look(entry)

    for entry in sorted(folder.iterdir()):
        look(entry)
    return volumes


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM by its first bytes."""
    return head_of(path)[128:132] == b"DICM"


def open_volume(path: Path, data: DataConfig) -> StoredVolume:
    """Open a volume without reading its values.

    Raises:
        ConfigError: It cannot be read, or its library is not installed.
    """
    opener = open_zarr
    if path.is_file():
        opener = open_nifti
    elif not any((path / mark).exists() for mark in MARKS):
        opener = open_dicom
    with readable(path):
        return opener(path, data)


def open_nifti(path: Path, data: DataConfig) -> StoredVolume:
    """Open a NIfTI file, whose fourth and fifth axes are channels; parts of .nii are mapped."""
    try:
        import nibabel
    except ImportError as error:
        raise needs("nibabel", path, "nifti") from error
    image: Any = nibabel.load(path)
    stored = image.dataobj
    sides = tuple((*image.shape, 1, 1)[:3])
    affine = image.affine[:3, :3]

    def read(spans: Sequence[slice]) -> Values:
        values = np.asarray(stored[tuple(spans)[: len(image.shape)]])
        channels: Values = values.reshape(*values.shape[:3], -1)
        return np.moveaxis(channels, -1, 0)

    return StoredVolume(
        sides,
        int(np.prod(image.shape[3:], initial=1)),
        read,
        not path.name.lower().endswith(".gz"),
        tuple(np.linalg.norm(affine, axis=0).tolist()),
        turned_axes(affine, data.orientation),
        data.orientation or "as stored",
    )


def open_dicom(path: Path, data: DataConfig) -> StoredVolume:
    """Open a folder that holds the slices of one DICOM series, of which only those needed are read.

    Values are rescaled by slope and intercept, to Hounsfield units of computed tomography.

    Raises:
        ConfigError: There are several series, or a slice is missing.
    """
    try:
        import pydicom
    except ImportError as error:
        raise needs("pydicom", path, "dicom") from error
    heads = [
        (each, pydicom.dcmread(each, stop_before_pixels=True))
        for each in sorted(path.iterdir())
        if is_dicom(each)
    ]
    first = heads[0][1]
    if len({head.SeriesInstanceUID for _, head in heads}) > 1:
        raise ConfigError("data.path", path, "holds slices of several series", "keep one a folder")
    across, down = np.array(first.ImageOrientationPatient, dtype=float).reshape(2, 3)
    normal = np.cross(across, down)
    places = [float(np.dot(normal, head.ImagePositionPatient)) for _, head in heads]
    order = np.argsort(places)
    gaps = np.diff(np.array(places)[order])
    step = float(np.median(gaps)) if len(gaps) else float(getattr(first, "SliceThickness", 1))
    if len(gaps) and (gaps.min() <= 0 or np.abs(gaps - step).max() > _GAP * step):
        text = f"its slices are {gaps.min():g} to {gaps.max():g} mm apart, so one is missing"
        raise ConfigError("data.path", path, text, "complete the series, or remove it")
    files = [heads[number][0] for number in order]

    def plane(file: Path) -> Values:
        slice_ = pydicom.dcmread(file)
        slope, intercept = (
            float(getattr(slice_, f"Rescale{name}", default))
            for name, default in (("Slope", 1), ("Intercept", 0))
        )
        return np.asarray(slice_.pixel_array * np.float32(slope) + np.float32(intercept))

    def read(spans: Sequence[slice]) -> Values:
        planes = [plane(file)[spans[1], spans[2]].astype(np.float32) for file in files[spans[0]]]
        return np.stack(planes)[np.newaxis]

    between, along = map(float, first.PixelSpacing)
    axes = turned_axes(_LPS_TO_RAS @ np.stack([normal, down, across], 1), data.orientation)
    sides = (len(files), int(first.Rows), int(first.Columns))
    if data.orientation is None:
        axes = ((0, False), (1, False), (2, False))
    return StoredVolume(
        sides, 1, read, True, (step, between, along), axes, data.orientation or "as stored"
    )


def open_zarr(path: Path, data: DataConfig) -> StoredVolume:
    """Open a Zarr array, or data.level of the pyramid of an OME-Zarr group.

    Axes are (z, y, x), or (y, x) of an image, after one of channels, or as OME-Zarr names them.

    Raises:
        ConfigError: It has other axes, more than one point in time, or no such level.
    """
    try:
        import zarr
    except ImportError as error:
        raise needs("zarr", path, "zarr") from error
    node: Any = zarr.open(str(path), mode="r")
    count = len(data.sides)
    names = ["c", *"zyx"[-count:]]
    scale: list[float] | None = None
    if not hasattr(node, "shape"):
        attributes = dict(node.attrs)
        scales = attributes.get("ome", attributes).get("multiscales")
        level = data.level or 0
        if not scales or level >= len(scales[0]["datasets"]):
            text = f"{path} is a group without multiscales of OME-Zarr, or without level {level}"
            raise ConfigError("data.level", data.level, text, "name the array itself as a volume")
        entry = scales[0]["datasets"][level]
        names = [each if isinstance(each, str) else each["name"] for each in scales[0]["axes"]]
        scale = next(
            (
                each["scale"]
                for each in entry.get("coordinateTransformations", ())
                if each["type"] == "scale"
            ),
            None,
        )
        node = node[entry["path"]]
    elif node.ndim == count:
        names = names[1:]
    if len(names) != node.ndim or names[-count:] != list("zyx"[-count:]):
        text = f"{path} has axes {''.join(names)} and shape {node.shape}, and the keys say {data.sides}"
        raise ConfigError("data.path", path, text, "set data.depth_px of volumes only")
    outer = names[:-count]
    if any(side > 1 for name, side in zip(outer, node.shape, strict=False) if name != "c"):
        text = f"{path} has axes {json.dumps(names)} of {node.shape}, more than channels"
        raise ConfigError("data.path", path, text, "store each point in time by itself")

    def read(spans: Sequence[slice]) -> Values:
        values: Values = np.asarray(node[(..., *spans)])
        return values.reshape(-1, *values.shape[-count:])

    return StoredVolume(
        tuple(node.shape[-count:]),
        int(np.prod(node.shape[:-count], initial=1)),
        read,
        True,
        tuple(scale[-count:] if scale else [1.0] * count),
        tuple((axis, False) for axis in range(count)),
    )


def _name(path: Path, folder: Path) -> str:
    name = str(path.relative_to(folder))
    suffix = next((each for each in SUFFIXES if name.lower().endswith(each)), "")
    return name.removesuffix(name[len(name) - len(suffix) :]) if suffix else name

"""Volumes of NIfTI, DICOM and Zarr: the same values from each, whole and in blocks."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gems.config.schema import DataConfig
from gems.data import check_data, open_dataset
from gems.data.dataset import Dataset
from gems.data.volumes.formats import open_volume
from gems.errors import ConfigError

nibabel = pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")
zarr = pytest.importorskip("zarr")
SHAPE = (6, 9, 10)  # depth, rows, columns
SPACING = (2.0, 0.5, 0.5)
KEYS: dict[str, Any] = {
    "channels": 1,
    "depth_px": SHAPE[0],
    "height_px": SHAPE[1],
    "width_px": SHAPE[2],
    "window": [-100.0, 300.0],
    "normalization": "none",
    "train_samples": 2,
    "validation_samples": 1,
}


def made_up(seed: int) -> np.ndarray:
    """Return Hounsfield units (depth, rows, columns), in the directions R, A and S."""
    return np.random.default_rng(seed).integers(-200, 400, SHAPE).astype(np.int16)


def write_nifti(path: Path, values: np.ndarray, codes: str = "RAS") -> Path:
    image = nibabel.Nifti1Image(values.transpose(2, 1, 0), np.diag([*SPACING[::-1], 1]))
    wanted = nibabel.orientations.axcodes2ornt(codes)
    turned = image.as_reoriented(
        nibabel.orientations.ornt_transform(nibabel.orientations.axcodes2ornt("RAS"), wanted)
    )
    nibabel.save(turned, path)
    return path


def write_dicom(folder: Path, values: np.ndarray, skip: int | None = None) -> Path:
    """Write a series as a scanner does: rows to the back, columns to the left."""
    folder.mkdir(parents=True)
    series = pydicom.uid.generate_uid()
    for number, plane in enumerate(values[:, ::-1, ::-1]):
        if number == skip:
            continue
        meta = pydicom.dataset.FileMetaDataset()
        meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
        meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
        one = pydicom.dataset.FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        one.SOPClassUID, one.SOPInstanceUID = (
            meta.MediaStorageSOPClassUID,
            meta.MediaStorageSOPInstanceUID,
        )
        one.SeriesInstanceUID = series
        one.Rows, one.Columns = plane.shape
        one.PixelSpacing = list(SPACING[1:])
        one.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        one.ImagePositionPatient = [0, 0, SPACING[0] * number]
        one.RescaleSlope, one.RescaleIntercept = 1, -1024
        one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
        one.BitsAllocated = one.BitsStored = 16
        one.HighBit, one.PixelRepresentation = 15, 0
        one.PixelData = (plane + 1024).astype(np.uint16).tobytes()
        # not in the order of names
        one.save_as(folder / f"{(7 * number) % 10}.dcm", enforce_file_format=True)
    return folder


def write_zarr(path: Path, values: np.ndarray) -> Path:
    array = zarr.create_array(str(path), shape=values.shape, chunks=(2, 4, 4), dtype=values.dtype)
    array[...] = values
    return path


def write_ome(path: Path, values: np.ndarray) -> Path:
    group = zarr.open_group(str(path), mode="w", zarr_format=2)
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    levels = [values, values[:, ::2, ::2]]
    for level, each in enumerate(levels):
        group.create_array(str(level), data=np.ascontiguousarray(each))
    scales = [[*SPACING], [SPACING[0], 2 * SPACING[1], 2 * SPACING[2]]]
    group.attrs["multiscales"] = [
        {
            "axes": axes,
            "datasets": [
                {"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": s}]}
                for level, s in enumerate(scales)
            ],
        }
    ]
    return path


WRITERS = {
    "v.nii": write_nifti,
    "v.nii.gz": write_nifti,
    "dicom": write_dicom,
    "v.zarr": write_zarr,
    "v.ome.zarr": write_ome,
}


def classes(folder: Path, name: str, **changes: Any) -> Dataset:
    for label in ("cyst", "tumour"):
        for number in range(3):
            parent = folder / label / f"p{number}"
            parent.mkdir(parents=True)
            WRITERS[name](parent / name, made_up(3 * (label == "tumour") + number))
    return open_dataset(DataConfig(**{"name": "volume", "path": str(folder), **KEYS, **changes}), 0)


@pytest.mark.parametrize("name", WRITERS)
def test_a_volume_is_the_same_in_each_format_and_in_blocks(tmp_path: Path, name: str) -> None:
    dataset = classes(tmp_path, name)
    wanted = {
        np.clip((made_up(seed) + 100) / np.float32(400), 0, 1)[np.newaxis].astype("f4").tobytes()
        for seed in range(6)
    }
    found = [dataset.image("validation", index) for index in range(dataset.num_validation)]
    assert {image.tobytes() for image in found} <= wanted
    assert dataset.num_train + dataset.num_validation == 6
    assert dataset.reads_rows("train") == (name != "v.nii.gz")
    seen = set()
    for draw in range(12):
        whole = dataset.image("train", 0, draw)
        block = dataset.rows("train", 0, draw, 1, 4, (2, 9), (0, 7))
        np.testing.assert_array_equal(block, whole[:, 1:4, 2:9, :7])
        seen.add(whole.tobytes())
    assert len(seen) > 4


@pytest.mark.parametrize("codes", ["LPS", "PIR", "SAL"])
def test_a_volume_is_turned_to_the_directions_that_are_asked_for(
    tmp_path: Path, codes: str
) -> None:
    path = write_nifti(tmp_path / "v.nii", made_up(0), codes)
    stored = open_volume(path, DataConfig(**KEYS))
    np.testing.assert_array_equal(stored.part(stored.whole)[0], made_up(0))
    assert stored.spacing_of_sample == pytest.approx(SPACING)
    turned = open_volume(path, DataConfig(**KEYS, orientation="LPS"))
    np.testing.assert_array_equal(turned.part(turned.whole)[0], made_up(0)[:, ::-1, ::-1])


def test_masks_follow_their_volumes_and_what_is_padded_is_ignored(tmp_path: Path) -> None:
    for number in range(3):
        for folder, values in (("images", made_up(number)), ("masks", made_up(number) > 0)):
            (tmp_path / folder).mkdir(exist_ok=True)
            write_nifti(tmp_path / folder / f"{number}.nii.gz", values.astype(np.int16), "LPS")
    keys = {**KEYS, "task": "segmentation", "depth_px": 8, "height_px": 5, "path": str(tmp_path)}
    dataset = open_dataset(DataConfig(name="volume", **keys), 0)
    image, mask = dataset.sample("train", 0, 3)
    assert image.shape == (1, 8, 5, 10)
    assert (mask[[0, -1]] == -1).all()
    np.testing.assert_array_equal(mask[1:-1] == 1, image[0, 1:-1] > 0.25)
    assert not dataset.reads_mask_rows("train")
    for path in list(tmp_path.rglob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    dataset = open_dataset(DataConfig(name="volume", **keys, nodata=0), 0)
    assert dataset.reads_mask_rows("train")
    for draw in range(8):
        part = dataset.mask_rows("train", 0, draw, 1, 7, (2, 5), (1, 6))
        np.testing.assert_array_equal(part, dataset.label("train", 0, draw)[1:7, 2:5, 1:6])
    with pytest.raises(ConfigError, match=r"set data\.task=segmentation"):
        check_data(DataConfig(name="volume", **{**keys, "task": None}))


def test_a_volume_is_resampled_to_a_spacing(tmp_path: Path) -> None:
    dataset = classes(tmp_path, "v.ome.zarr", spacing_mm=[1, 1, 1], depth_px=12, height_px=4)
    assert not dataset.reads_rows("train")
    assert 0.3 < dataset.image("train", 0)[:, :, :, 3:-3].mean() < 0.7


def test_levels_of_ome_zarr_and_images_of_two_axes(tmp_path: Path) -> None:
    path = write_ome(tmp_path / "v.ome.zarr", made_up(0))
    stored = open_volume(path, DataConfig(**KEYS, level=1))
    assert stored.shape == (6, 5, 5) and stored.spacing_of_sample == (2.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="without level 2"):
        open_volume(path, DataConfig(**KEYS, level=2))
    image = write_zarr_image(tmp_path / "image.zarr")
    stored = open_volume(image, DataConfig(channels=3))
    assert stored.channels == 3 and stored.shape == (40, 30) and stored.gives_parts


def write_zarr_image(path: Path) -> Path:
    array = zarr.create_array(str(path), shape=(3, 40, 30), chunks=(3, 8, 8), dtype="u1")
    array[...] = 7
    return path


def test_what_would_be_misread_is_refused(tmp_path: Path) -> None:
    data = DataConfig(**KEYS)
    with pytest.raises(ConfigError, match="so one is missing"):
        open_volume(write_dicom(tmp_path / "series", made_up(0), skip=2), data)
    with pytest.raises(ConfigError, match="set it for volumes only"):
        classes(tmp_path / "two", "v.nii", depth_px=None).image("train", 0)
    for changes, words in (
        ({"window": [3.0, 1.0]}, "low below high"),
        ({"spacing_mm": [1.0]}, "must have 3 entries"),
        ({"orientation": "RLS"}, "one axis twice"),
        ({"window": None}, "of volumes data"),
    ):
        with pytest.raises(ConfigError, match=words):
            classes(tmp_path / words.replace(" ", ""), "v.nii", **changes).image("train", 0)

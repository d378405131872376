"""Volumes of one class each in folders, or volumes and masks with the class of each voxel."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from gems.config.schema import DataConfig
from gems.data.dataset import NO_LABEL, Box, Label, Split, Tokens, as_mask
from gems.data.files.paths import SPLIT_NAMES, data_folder, folders_in, split_folders
from gems.data.files.values import Values, as_nodata, checked
from gems.data.images import KEYS, ImageDataset, image_source, stamps
from gems.data.masks import check_values_of_map, mapped
from gems.data.splits import split_indices
from gems.data.table import class_numbers, split_records
from gems.data.volumes.formats import open_volume, volumes_below
from gems.data.volumes.resampled import middle, resampled
from gems.data.volumes.stored import DIRECTIONS, StoredVolume
from gems.errors import ConfigError

_LAYOUTS = (
    "PATH/CLASS/* or PATH/images/* and PATH/masks/*, or these in PATH/train and PATH/validation"
)
_IMAGES, _MASKS = "images", "masks"
_log = logging.getLogger(__name__)
Sample = tuple[Path, Path | int]  # a volume, and its mask or class


@image_source(
    "volume",
    tasks=("classification", "segmentation"),
    keys=(
        *(key for key in KEYS if key not in ("bits", "page")),
        *("depth_px", "window", "spacing_mm", "orientation", "level"),
        *("split_path", "class_map", "ignore_label"),
    ),
)
class VolumeDataset(ImageDataset):
    """NIfTI files, DICOM series (a folder each) and Zarr or OME-Zarr arrays.

    They are in folders of classes, or for data.task=segmentation in images/ and masks/, with the
    same names; either may be in train/ and validation/. A volume is turned to data.orientation and
    resampled to data.spacing_mm if that is given; its middle is kept, or it is padded with 0, which
    masks ignore. Zarr arrays of two axes are images, without data.depth_px.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        _check(data)
        self._is_masked = data.task == "segmentation"
        root = data_folder(data, _LAYOUTS)
        self._samples: dict[Split, list[Sample]]
        self._samples = (
            _with_masks(root, data, seed)
            if self._is_masked
            else self._with_classes(root, data, seed)
        )
        self._open: dict[tuple[Path, int], StoredVolume] = {}
        self._process = os.getpid()
        train, validation = (len(self._samples[split]) for split in SPLIT_NAMES)
        super().__init__(data, train, validation, seed)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without opened volumes; another process opens them itself."""
        return self.__dict__ | {"_open": {}}

    def name_of(self, split: Split, index: int) -> str:
        """Return the path of a volume."""
        return str(self._samples[split][index][0])

    def files(self) -> list[Path]:
        """Return the volumes and masks."""
        pairs = (pair for samples in self._samples.values() for pair in samples)
        return [path for pair in pairs for path in pair if isinstance(path, Path)]

    def identity(self, split: Split) -> str:
        """Return the names, sizes and times of a split's volumes, and how they are read."""
        data = self.config
        how = (data.window, data.spacing_mm, data.orientation, data.level)
        return f"{stamps([path for path, _ in self._samples[split]])} {how}"

    def prepare(self) -> None:
        """Log how volumes are read, and compute the normalisation that is not configured."""
        super().prepare()
        data = self.config
        first = self._volume(self._samples["train"][0][0])
        mean, deviation = (statistic.ravel().tolist() for statistic in self.statistics())
        _log.info(
            "data=volume: the first of %d volumes has %s voxels %s apart (outer axis first), axes"
            " %s; window %s, then mean %s and deviation %s; %s",
            self.num_train + self.num_validation,
            " x ".join(map(str, first.shape)),
            " x ".join(f"{statistic:.4g}" for statistic in first.spacing_of_sample),
            first.orientation,
            data.window,
            mean,
            deviation,
            "read by blocks" if self.reads_rows("train") else "read whole",
        )

    def examine(self, split: Split, index: int) -> None:
        """Read a volume, and its mask if it has one, completely.

        Raises:
            ConfigError: They would be misread.
        """
        for box in self.bands():
            self.part(split, index, box)
        self._examine_label(split, index)

    def nodata(self, split: Split, index: int) -> float | None:
        """Return data.nodata."""
        return None if self.config.nodata is None else as_nodata(self.config.nodata)

    def reads_rows(self, split: Split) -> bool:
        """Return whether parts of all volumes can be read: not of .nii.gz, or if resampled."""
        if self._is_transformed(split):
            return False
        if split not in self._by_rows:
            self._by_rows[split] = all(
                self._volume(path).gives_parts for path, _ in self._samples[split]
            )
        return self._by_rows[split]

    def values(self, split: Split, index: int) -> Values:
        """Return the middle of a volume; with data.window as shares of that range."""
        return self.part(split, index, self._whole)

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of the volume that `values` returns."""
        data = self.config
        path = self._samples[split][index][0]
        values = middle(self._volume(path), self.shape[1:], box, 0)
        if data.window is not None:
            low, high = data.window
            values = np.clip((values.astype(np.float32) - low) / (high - low), 0, 1)
        elif values.dtype != np.uint8:
            values = values.astype(np.float32)
        return checked(values, data, str(path), self.nodata(split, index), box[0].start)

    @property
    def _whole(self) -> Box:
        return Box(*(slice(0, side) for side in self.shape[1:]))

    def reads_mask_rows(self, split: Split) -> bool:
        """Return whether parts of all volumes and masks can be read."""
        if not self._is_masked or not self.reads_rows(split):
            return False
        masks = (mask for _, mask in self._samples[split] if isinstance(mask, Path))
        return all(self._volume(mask, 0).gives_parts for mask in masks)

    def _label(self, split: Split, index: int) -> Label:
        mask = self._samples[split][index][1]
        return self._mask(split, index, self._whole) if isinstance(mask, Path) else mask

    def _mask(self, split: Split, index: int, box: Box) -> Tokens:
        path, mask = self._samples[split][index]
        assert isinstance(mask, Path)
        stored = self._volume(mask, 0)
        shape = self._volume(path).shape
        if stored.shape != shape or stored.channels != 1:
            text = f"{mask} has {stored.channels} x {stored.shape} voxels, and its volume {shape}"
            raise ConfigError("data.path", self.config.path, text, "give both the same voxels")
        values = middle(stored, self.shape[1:], box, NO_LABEL)[0]
        numbers = mapped(values, self.config.class_map)
        classes = as_mask(numbers, self.config, str(mask))
        return cast(Tokens, self._without_nodata(classes, split, index, box))

    def _volume(self, path: Path, order: int = 1) -> StoredVolume:
        """Return an opened volume, or with `order` 0 a mask, turned and resampled."""
        if self._process != os.getpid():
            self._open, self._process = {}, os.getpid()
        if (path, order) not in self._open:
            data = self.config
            stored = open_volume(path, data)
            if len(stored.sides) != len(data.sides):
                text = f"{path} has {len(stored.sides)} axes, and the keys say {data.sides}"
                raise ConfigError("data.depth_px", data.depth_px, text, "set it for volumes only")
            if not order:
                stored = replace(stored, read=partial(_numbers, stored, path))
            self._open[path, order] = resampled(stored, data.spacing_mm, order)
        return self._open[path, order]

    def _with_classes(self, root: Path, data: DataConfig, seed: int) -> dict[Split, list[Sample]]:
        """Return the volumes of folders of classes, each with its class."""
        if (root / _IMAGES).is_dir() and (root / _MASKS).is_dir():
            text = f"{root} has {_IMAGES}/ and {_MASKS}/"
            raise ConfigError("data.task", data.task, text, "set data.task=segmentation")
        folders = split_folders(root, layouts=_LAYOUTS)
        parts = {"": root} if folders is None else dict(folders)
        records = [
            {"file": str(path), "label": name, **({"split": split} if split else {})}
            for split, folder in parts.items()
            for name in folders_in(folder)
            for path in volumes_below(folder / name).values()
        ]
        if not records:
            raise ConfigError("data.path", data.path, "has no volume", f"lay it out as {_LAYOUTS}")
        names = [record["label"] for record in records]
        self.class_numbers = class_numbers(data, names, "the folder", False)
        splits = split_records(data, "data.path", records, names, seed)
        return {
            split: [(Path(one["file"]), self.class_numbers[one["label"]]) for one in chosen]
            for split, chosen in splits.items()
        }


def _with_masks(root: Path, data: DataConfig, seed: int) -> dict[Split, list[Sample]]:
    """Return the volumes of images/, each with its mask."""
    check_values_of_map(data)
    folders = split_folders(root, _IMAGES, _LAYOUTS)
    if folders is not None:
        return {split: _pairs(folder, data) for split, folder in folders.items()}
    pairs = _pairs(root, data)
    indices = split_indices(data, len(pairs), seed)
    return {split: [pairs[index] for index in chosen] for split, chosen in indices.items()}


def _pairs(folder: Path, data: DataConfig) -> list[Sample]:
    for name in (_IMAGES, _MASKS):
        if not (folder / name).is_dir():
            text = f"has no folder {folder / name}"
            raise ConfigError("data.path", data.path, text, f"lay it out as {_LAYOUTS}")
    images, masks = (volumes_below(folder / name) for name in (_IMAGES, _MASKS))
    lonely = sorted(set(images) ^ set(masks))
    if lonely:
        text = f"{folder} has {lonely[0]} in only one of {_IMAGES}/ and {_MASKS}/"
        raise ConfigError("data.path", data.path, text, "give both the same names")
    return [(images[name], masks[name]) for name in sorted(images)]


def _numbers(stored: StoredVolume, path: Path, spans: Sequence[slice]) -> Values:
    """Return a part of a mask as whole numbers."""
    values = stored.read(spans)
    numbers = np.rint(values).astype(np.int64)
    if not np.array_equal(numbers, values):
        text = f"{path} has values that are no whole numbers"
        raise ConfigError("data.path", path, text, "a mask holds the number of each voxel's class")
    return numbers


def _check(data: DataConfig) -> None:
    """Raise ConfigError if the keys of volumes contradict each other."""
    window = data.window
    if window is not None and (len(window) != 2 or window[0] >= window[1]):
        raise ConfigError("data.window", window, "must be [low,high], low below high")
    spacing = data.spacing_mm
    if spacing is not None and len(spacing) != len(data.sides):
        text = f"must have {len(data.sides)} entries, as the keys say {data.sides}"
        raise ConfigError("data.spacing_mm", spacing, text, "give the outer axis first")
    turned = data.orientation
    if turned is not None and len({DIRECTIONS[letter][0] for letter in turned}) != len(turned):
        raise ConfigError(
            "data.orientation", turned, "names one axis twice", "use RAS, LPS, or null as stored"
        )

"""Images and labels in HDF5 files: one file, or many that match a pattern."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import Box, Label, Split, Tokens, as_label, as_mask
from gems.data.files.paths import SPLIT_NAMES, expanded, is_left_over
from gems.data.files.values import Values, as_nodata, checked, fitted, have_one_shape, range_of
from gems.data.images import KEYS, ImageDataset, image_source, stamps
from gems.data.masks import check_values_of_map, mapped
from gems.data.splits import split_indices
from gems.data.table import class_numbers
from gems.errors import ConfigError

_PLACE = "{split}"
_TEXT = "SUO"  # kinds of text types
_WHOLE = Box(slice(None), slice(None))
# with fewer chunks, reading rows saves too little memory
_LEAST_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """The samples of one file."""

    path: str
    image_key: str
    label_key: str
    count: int
    is_channels_last: bool
    gives_parts: bool  # whether parts can be read without the rest of the image
    dtype: Any
    nodata: float | None
    has_text: bool  # whether the labels are texts
    # for parts of masks: the index before and after the ranges, if they can be read
    mask_places: tuple[tuple[int, ...], tuple[int, ...]] | None


@image_source(
    "hdf5",
    tasks=TASKS,
    keys=(*KEYS, "image_key", "label_key", "layout", "split_path", "class_map", "ignore_label"),
)
class Hdf5Dataset(ImageDataset):
    """Images of data.image_key and labels of data.label_key, in the files of data.path.

    The path is a file or a pattern with *. `{split}` in the path or the keys stands for train and
    validation (or val); without it, data.split_path or the seed divides the samples. With
    data.task=segmentation the label of an image is a mask. Text labels are names of classes. Each
    process opens the files that it reads, on first use.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._task = data.task or TASKS[0]
        texts = (data.path, data.image_key, data.label_key)
        if any(_PLACE in str(text) for text in texts):
            self._parts = {split: _parts(data, split) for split in SPLIT_NAMES}
            self._places = {split: _places(found) for split, found in self._parts.items()}
        else:
            self._parts = dict.fromkeys(SPLIT_NAMES, _parts(data, "train"))
            places = _places(self._parts["train"])
            indices = split_indices(data, len(places), seed)
            self._places = {split: places[indices[split]] for split in SPLIT_NAMES}
        self.class_numbers = _numbers_of(
            data, dict.fromkeys(part for parts in self._parts.values() for part in parts)
        )
        self._open: dict[str, Any] = {}
        self._process = os.getpid()
        super().__init__(data, len(self._places["train"]), len(self._places["validation"]), seed)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open files; another process opens them itself."""
        return self.__dict__ | {"_open": {}}

    def name_of(self, split: Split, index: int) -> str:
        """Return the file of a sample, its key and its row."""
        part, row = self._place(split, index)
        return f"{part.path}:{part.image_key}[{row}]"

    def files(self) -> list[Path]:
        """Return all files that the dataset reads."""
        return sorted({Path(part.path) for parts in self._parts.values() for part in parts})

    def examine(self, split: Split, index: int) -> None:
        """Read an image whose type does not determine its range, and a mask.

        Raises:
            ConfigError: They would be misread.
        """
        part, _ = self._place(split, index)
        if (
            part.dtype.kind == "f"
            or range_of(part.dtype, self.config.bits) < np.iinfo(part.dtype).max
        ):
            nodata = self.nodata(split, index)
            name = self.name_of(split, index)
            for box in self.bands() if part.gives_parts else (_WHOLE,):
                first = box.rows.start or 0
                checked(self._stored(split, index, box), self.config, name, nodata, first)
        if self._task == "segmentation":
            self._examine_label(split, index)

    def values(self, split: Split, index: int) -> Values:
        """Return an image as stored, with channels first, fitted like images of image files."""
        stored = self._stored(split, index, _WHOLE)
        nodata = self.nodata(split, index)
        return fitted(stored, self.config, self.name_of(split, index), nodata)

    def nodata(self, split: Split, index: int) -> float | None:
        """Return the nodata value of an image, from data.nodata or the attribute _FillValue."""
        return self._place(split, index)[0].nodata

    def reads_rows(self, split: Split) -> bool:
        """Return whether parts of images can be read.

        All images must have the configured sides and be contiguous or in small chunks, and no
        transform may apply.
        """
        return not self._is_transformed(split) and all(
            part.gives_parts for part in self._parts[split]
        )

    def _has_bytes(self, split: Split) -> bool:
        return all(part.dtype == np.uint8 for part in self._parts[split])

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of the image that `values` returns."""
        stored = self._stored(split, index, box)
        nodata = self.nodata(split, index)
        return checked(stored, self.config, self.name_of(split, index), nodata, box.rows.start)

    def identity(self, split: Split) -> str:
        """Return the names, sizes and times of a split's files, and the places of its samples."""
        files = sorted({Path(part.path) for part in self._parts[split]})
        return f"{stamps(files)} {self.config.image_key} {self._places[split].tolist()}"

    def _label(self, split: Split, index: int) -> Label:
        part, row = self._place(split, index)
        value = self._read(part.path, part.label_key, row)
        name = self.name_of(split, index)
        if part.has_text:
            return self.class_numbers[_texts(value)[0]]
        if self._task == "segmentation" and value.ndim in (2, 3):
            planes = (
                np.moveaxis(value, -1, 0) if value.ndim == 3 and value.shape[-1] == 1 else value
            )
            value = fitted(
                planes if planes.ndim == 3 else planes[np.newaxis], self.config, name, is_mask=True
            )
        if self._task in ("segmentation", TASKS[0]):
            value = mapped(value, self.config.class_map)
        return self._without_nodata(as_label(value, self.config, self._task, name), split, index)

    def reads_mask_rows(self, split: Split) -> bool:
        """Return whether parts of images and masks can be read."""
        return self.reads_rows(split) and all(
            part.mask_places is not None for part in self._parts[split]
        )

    def _mask(self, split: Split, index: int, box: Box) -> Tokens:
        part, row = self._place(split, index)
        assert part.mask_places is not None
        before, after = part.mask_places
        values = self._read(part.path, part.label_key, (row, *before, *box, *after))
        name = self.name_of(split, index)
        classes = as_mask(mapped(values, self.config.class_map), self.config, name)
        return cast(Tokens, self._without_nodata(classes, split, index, box))

    def _place(self, split: Split, index: int) -> tuple[_Part, int]:
        number, row = self._places[split][index].tolist()
        return self._parts[split][number], row

    def _stored(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of an image as stored, with channels first."""
        part, row = self._place(split, index)
        values = self._read(
            part.path, part.image_key, (row, *(box if part.is_channels_last else (..., *box)))
        )
        if values.ndim == 2:
            values = values[np.newaxis]
        elif part.is_channels_last:
            values = values.transpose(2, 0, 1)
        return values

    def _read(self, path: str, key: str, place: Any) -> NDArray[Any]:
        import h5py

        # file handles cannot be shared with a forked process
        if self._process != os.getpid():
            self._open, self._process = {}, os.getpid()
        if path not in self._open:
            self._open[path] = h5py.File(path, "r")
        return np.asarray(self._open[path][key][place])


def _numbers_of(data: DataConfig, parts: Iterable[_Part]) -> dict[str, int]:
    """Return the number of each class that occurs in text labels."""
    named = [part for part in parts if part.has_text]
    if not named:
        return {}
    names: list[str] = []
    for part in named:
        with _opened(part.path) as file:
            names += _texts(file[part.label_key][()])
    return class_numbers(data, sorted(set(names)), named[0].label_key, is_table=True)


def _texts(labels: Any) -> list[str]:
    """Return text labels, as h5py returns them, without surrounding spaces."""
    return [
        (text.decode() if isinstance(text, bytes) else str(text)).strip()
        for text in np.asarray(labels).ravel()
    ]


def _places(parts: list[_Part]) -> NDArray[np.int64]:
    """Return the (part, row) of each sample, of shape (samples, 2)."""
    return np.concatenate(
        [
            np.stack([np.full(part.count, number), np.arange(part.count)], axis=1)
            for number, part in enumerate(parts)
        ]
    )


def _parts(data: DataConfig, split: Split) -> list[_Part]:
    """Return the part of each file that belongs to a split, without reading samples."""
    if data.path is None:
        raise ConfigError(
            "data.path", None, "data=hdf5 needs a file", "or a pattern, as in tiles/*.h5"
        )
    patterns = [str(expanded("data.path", text)) for text in _by_split(data.path, split)]
    matches = (sorted(glob.glob(pattern, recursive=True)) for pattern in patterns)
    paths = [
        path
        for path in next(filter(None, matches), [])
        if not any(map(is_left_over, Path(path).parts[-2:]))
    ]
    if not paths:
        raise ConfigError("data.path", data.path, f"no file is called {' or '.join(patterns)}")
    parts = [_part(data, path, split) for path in paths]
    if not any(part.count for part in parts):
        raise ConfigError("data.path", data.path, f"has no sample in {data.image_key}")
    return parts


def _by_split(text: str, split: Split) -> list[str]:
    """Return a text with {split} replaced by each name of the split."""
    return list(dict.fromkeys(text.replace(_PLACE, name) for name in SPLIT_NAMES[split]))


def _found(data: DataConfig, file: Any, name: str, split: Split) -> Any:
    """Return the dataset of a file that the key data.`name` names."""
    keys = _by_split(getattr(data, name), split)
    key = next((key for key in keys if key in file), keys[0])
    if key in file and hasattr(file[key], "shape"):
        return file[key]
    names: list[str] = []
    file.visititems(lambda name, entry: names.append(name) if hasattr(entry, "shape") else None)
    text = f"is no dataset of {file.filename}"
    raise ConfigError(f"data.{name}", key, text, f"it has {', '.join(names[:8]) or 'none'}")


def _part(data: DataConfig, path: str, split: Split) -> _Part:
    with _opened(path) as file:
        images, labels = (_found(data, file, name, split) for name in ("image_key", "label_key"))
        image_key, label_key = images.name.lstrip("/"), labels.name.lstrip("/")
        if len(images.shape) not in (3, 4) or labels.shape[:1] != images.shape[:1]:
            text = (
                f"{path} has {image_key} of shape {images.shape} and {label_key} of shape"
                f" {labels.shape}"
            )
            advice = "must be samples first, as many in both"
            raise ConfigError("data.image_key", image_key, text, advice)
        layout = str(images.attrs.get("layout", "auto")) if data.layout == "auto" else data.layout
        is_last = _is_channels_last(data, path, images.shape, layout)
        axis = 1 if is_last else -2
        sides = images.shape[axis], images.shape[axis + 1]
        is_fine = images.chunks is None or images.chunks[axis] * _LEAST_CHUNKS <= sides[0]
        _check_types(data, path, images, labels)
        mask_sides = tuple(side for side in labels.shape[1:] if side != 1)
        is_mask = data.task == "segmentation" and len(mask_sides) == 2
        if is_mask and not have_one_shape(mask_sides, sides):
            text = (
                f"{path} has masks of {mask_sides} in {label_key}, and images of {sides} in"
                f" {image_key}"
            )
            raise ConfigError("data.label_key", label_key, text, "give both one size")
        return _Part(
            path,
            image_key,
            label_key,
            images.shape[0],
            is_last,
            is_fine and sides == (data.height_px, data.width_px),
            images.dtype,
            as_nodata(images.attrs.get("_FillValue") if data.nodata is None else data.nodata),
            labels.dtype.kind in _TEXT,
            _mask_places(labels, data) if is_mask else None,
        )


def _mask_places(labels: Any, data: DataConfig) -> Any:
    """Return the indices around the ranges of a part of a mask; None if parts cannot be read."""
    sides = data.height_px, data.width_px
    places: dict[tuple[int, ...], Any] = {
        sides: ((), ()),
        (1, *sides): ((0,), ()),
        (*sides, 1): ((), (0,)),
    }
    before_after = places.get(labels.shape[1:])
    if before_after is None or labels.chunks is None:
        return before_after
    axis = 1 + len(before_after[0])
    is_fine = labels.chunks[axis] * _LEAST_CHUNKS <= data.height_px
    return before_after if is_fine else None


def _check_types(data: DataConfig, path: str, images: Any, labels: Any) -> None:
    if images.dtype.kind != "f" and not (images.dtype.kind == "u" and images.dtype.itemsize <= 2):
        text = f"{path} has values of type {images.dtype}"
        raise ConfigError(
            "data.image_key", images.name.lstrip("/"), text, "use uint8, uint16 or float32"
        )
    if labels.dtype.kind not in _TEXT:
        check_values_of_map(data)
        return
    task = data.task or TASKS[0]
    if task != TASKS[0] or math.prod(labels.shape) != labels.shape[0]:
        text = f"{path} has labels of text, of shape {labels.shape}"
        raise ConfigError(
            "data.task",
            task,
            text,
            "texts are names of classes: one a sample, data.task=classification",
        )


def _is_channels_last(data: DataConfig, path: str, shape: tuple[int, ...], layout: str) -> bool:
    """Return whether images are (height, width, channels).

    Raises:
        ConfigError: Neither or both of the first and last axes have data.channels entries.
    """
    if len(shape) == 3:
        if data.channels != 1:
            raise ConfigError(
                "data.channels",
                data.channels,
                f"{path} has grey images {shape[1:]}",
                "set data.channels=1",
            )
        return False
    first = shape[1] == data.channels
    last = shape[3] == data.channels
    if layout.lower() in ("chw", "hwc"):
        first = layout.lower() == "chw" and first
        last = layout.lower() == "hwc" and last
    if not first and not last:
        text = f"{path} has images of shape {shape[1:]}" + (
            "" if layout == "auto" else f", layout {layout}"
        )
        raise ConfigError(
            "data.channels", data.channels, text, "set data.channels, or data.layout=chw or hwc"
        )
    if first and last:
        raise ConfigError(
            "data.layout", "auto", f"{path} has images of shape {shape[1:]}", "say chw or hwc"
        )
    return last


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        raise ConfigError("data.path", path, f"is no readable HDF5 file ({error})") from error

"""Images and labels of HDF5 files: one, or many by a pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import DATASETS, Box, Label, Source, Split, as_label
from gems.data.images import KEYS, ImageDataset, Values, check_images, checked, fitted, stamps
from gems.data.masks import mapped
from gems.data.splits import split_indices
from gems.errors import ConfigError

_SPLITS: tuple[Split, Split] = ("train", "validation")
_PLACE = "{split}"
_WHOLE = Box(slice(None), slice(None))
_LEAST_CHUNKS = 4  # by which rows are read with much less than the whole


@dataclass(frozen=True, slots=True)
class _Part:
    """The samples of one file."""

    path: str
    image_key: str
    label_key: str
    count: int
    is_channels_last: bool
    gives_parts: bool  # without the rest of an image


class Hdf5Dataset(ImageDataset):
    """Images of data.image_key and labels of data.label_key, sample by sample, in the files that data.path names.

    The path is a file or a pattern with *; `{split}` in path or keys stands for train and validation, else
    data.split_path or the seed divides the samples. A mask of each image is a label of data.task=segmentation. Each
    process opens the files that it reads, when it does.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        check_images(data)
        self._task = data.task or TASKS[0]
        parts = {split: _parts(data, split) for split in (_SPLITS if _is_split(data) else _SPLITS[:1])}
        places = {split: _places(found) for split, found in parts.items()}
        if not _is_split(data):
            indices = split_indices(data, len(places["train"]), seed)
            parts = {split: parts["train"] for split in _SPLITS}
            places = {split: places["train"][indices[split]] for split in _SPLITS}
        self._parts, self._places = parts, places
        self._open: dict[str, Any] = {}
        self._process = os.getpid()
        super().__init__(data, len(places["train"]), len(places["validation"]), seed)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the open files, which another process opens itself."""
        return self.__dict__ | {"_open": {}}

    def name_of(self, split: Split, index: int) -> str:
        """Return the file of a sample, its key and its place."""
        part, row = self._place(split, index)
        return f"{part.path}:{part.image_key}[{row}]"

    def values(self, split: Split, index: int) -> Values:
        """Return an image as it is stored, channels first, fitted as those of image files."""
        return fitted(self._stored(split, index, _WHOLE), self.config, self.name_of(split, index))

    def reads_rows(self, split: Split) -> bool:
        """Return whether all images have the wanted sides and small chunks or none, and nothing transforms them."""
        return not self._is_transformed(split) and all(part.gives_parts for part in self._parts[split])

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of `values`."""
        return checked(self._stored(split, index, box), self.config, self.name_of(split, index))

    def identity(self, split: Split) -> str:
        """Return names, sizes and times of a split's files, and which of their samples are in it."""
        files = sorted({Path(part.path) for part in self._parts[split]})
        return f"{stamps(files)} {self.config.image_key} {self._places[split].tolist()}"

    def _label(self, split: Split, index: int) -> Label:
        part, row = self._place(split, index)
        given = self._read(part.path, part.label_key, row)
        if self._task == "segmentation" and given.ndim == 2:
            given = fitted(given[np.newaxis], self.config, self.name_of(split, index), is_mask=True)[0]
            given = mapped(given, self.config.class_map)
        return as_label(given, self.config, self._task, self.name_of(split, index))

    def _place(self, split: Split, index: int) -> tuple[_Part, int]:
        number, row = self._places[split][index].tolist()
        return self._parts[split][number], row

    def _stored(self, split: Split, index: int, box: Box) -> Values:
        """Return a part of an image as it is stored, channels first."""
        part, row = self._place(split, index)
        given = self._read(part.path, part.image_key, (row, *(box if part.is_channels_last else (..., *box))))
        if given.ndim == 2:
            given = given[np.newaxis]
        elif part.is_channels_last:
            given = given.transpose(2, 0, 1)
        if given.dtype not in (np.uint8, np.uint16) and not np.issubdtype(given.dtype, np.floating):
            text = f"{self.name_of(split, index)} has values of type {given.dtype}"
            raise ConfigError("data.image_key", part.image_key, text, "use uint8, uint16 or float32")
        return given

    def _read(self, path: str, key: str, place: Any) -> NDArray[Any]:
        import h5py

        if self._process != os.getpid():  # handles of a process that forked are not its own
            self._open, self._process = {}, os.getpid()
        if path not in self._open:
            self._open[path] = h5py.File(path, "r")
        return np.asarray(self._open[path][key][place])


def check(data: DataConfig) -> None:
    """Raise ConfigError for files or keys that are not there, or of another shape; reads no image."""
    check_images(data)
    for split in _SPLITS if _is_split(data) else _SPLITS[:1]:
        _parts(data, split)


def _is_split(data: DataConfig) -> bool:
    return any(_PLACE in str(text) for text in (data.path, data.image_key, data.label_key))


def _places(parts: list[_Part]) -> NDArray[np.int64]:
    """Return (part, row) of each sample, shape (samples, 2)."""
    return np.concatenate([
        np.stack([np.full(part.count, number), np.arange(part.count)], axis=1) for number, part in enumerate(parts)
    ])  # fmt: skip


def _parts(data: DataConfig, split: Split) -> list[_Part]:
    """Return what each file holds of a split, without reading samples."""
    if data.path is None:
        raise ConfigError("data.path", None, "data=hdf5 needs a file", "or a pattern, as in tiles/*.h5")
    pattern = os.path.expanduser(data.path.replace(_PLACE, split))
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise ConfigError("data.path", data.path, f"no file is called {pattern}")
    found = [_part(data, path, split) for path in paths]
    if not any(part.count for part in found):
        raise ConfigError("data.path", data.path, f"has no sample in {data.image_key}")
    return found


def _part(data: DataConfig, path: str, split: Split) -> _Part:
    with _opened(path) as file:
        image_key, label_key = (key.replace(_PLACE, split) for key in (data.image_key, data.label_key))
        for name, key in (("data.image_key", image_key), ("data.label_key", label_key)):
            if key not in file or not hasattr(file[key], "shape"):
                names: list[str] = []
                file.visititems(
                    lambda name, entry, names=names: names.append(name) if hasattr(entry, "shape") else None
                )
                raise ConfigError(name, key, f"is no dataset of {path}", f"it has {', '.join(names[:8]) or 'none'}")
        images, labels = file[image_key], file[label_key]
        if len(images.shape) not in (3, 4) or not labels.shape or labels.shape[0] != images.shape[0]:
            text = f"{path} has {image_key} of shape {images.shape} and {label_key} of shape {labels.shape}"
            raise ConfigError("data.image_key", image_key, text, "must be samples first, as many in both")
        layout = str(images.attrs.get("layout", "auto")) if data.layout == "auto" else data.layout
        is_last = _is_channels_last(data, path, images.shape, layout)
        axis = 1 if is_last else -2
        sides = images.shape[axis], images.shape[axis + 1]
        is_fine = images.chunks is None or images.chunks[axis] * _LEAST_CHUNKS <= sides[0]
        gives_parts = is_fine and sides == (data.height_px, data.width_px)
        return _Part(path, image_key, label_key, images.shape[0], is_last, gives_parts)


def _is_channels_last(data: DataConfig, path: str, shape: tuple[int, ...], layout: str) -> bool:
    """Return whether images are (height, width, channels).

    Raises:
        ConfigError: neither first nor last axis, or either of them, has data.channels entries.
    """
    if len(shape) == 3:
        if data.channels != 1:
            raise ConfigError(
                "data.channels", data.channels, f"{path} has grey images {shape[1:]}", "set data.channels=1"
            )
        return False
    first, last = shape[1] == data.channels, shape[3] == data.channels
    if layout.lower() in ("chw", "hwc"):
        first, last = layout.lower() == "chw" and first, layout.lower() == "hwc" and last
    if not first and not last:
        text = f"{path} has images of shape {shape[1:]}" + ("" if layout == "auto" else f", layout {layout}")
        raise ConfigError("data.channels", data.channels, text, "set data.channels, or data.layout=chw or hwc")
    if first and last:
        raise ConfigError("data.layout", "auto", f"{path} has images of shape {shape[1:]}", "say chw or hwc")
    return last


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        raise ConfigError("data.path", path, f"is no readable HDF5 file ({error})") from error


DATASETS.register(
    "hdf5",
    Source(
        Hdf5Dataset,
        check,
        tasks=TASKS,
        counts_itself=True,
        keys=(*KEYS, "image_key", "label_key", "layout", "split_path", "class_map", "ignore_label"),
    ),
)

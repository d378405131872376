"""A directory of images by class."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gems.config.schema import DataConfig
from gems.data.dataset import DATASETS, Dataset, Image, Source, Split, generator
from gems.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_MAX_THREADS = 8
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_MIDDLE = 127.5
_SPREAD = 64.0
_LAYOUTS = "PATH/train/CLASS/* and PATH/validation/CLASS/*, or PATH/CLASS/*"

Files = list[tuple[Path, int]]


class FolderDataset(Dataset):
    """Images of PATH/train/CLASS/* and PATH/validation/CLASS/*, or of PATH/CLASS/* split by the seed.

    Without a split each class gives the share data.validation_samples / (data.train_samples +
    data.validation_samples) of its images to validation; all images are used, whatever those two counts are.
    Classes are numbered by sorted name. An image is scaled to cover height x width and its middle kept; bytes
    map to (byte - 127.5) / 64.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        check(data)
        self._files = _split(data, seed)
        shape = (data.channels, data.height_px, data.width_px)
        counts = (len(self._files["train"]), len(self._files["validation"]))
        super().__init__(shape, data.num_classes, *counts, seed, data.augment)
        for split, count in zip(("train", "validation"), counts, strict=True):
            if not count:
                raise ConfigError("data.path", data.path, f"no image is left for {split}", "add images")
        paths = [path for files in self._files.values() for path, _ in files]
        # every file is read through once, several at a time
        with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            for path, problem in zip(paths, pool.map(_problem, paths), strict=True):
                if problem:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise ConfigError(
                        "data.path", path, f"not a readable image: {problem}", "repair or remove the file"
                    )

    def path(self, split: Split, index: int) -> Path:
        """Return the file of an image."""
        return self._files[split][index][0]

    def _pixels(self, split: Split, index: int) -> Image:
        from PIL import ImageOps
        from PIL.Image import Resampling

        channels, height, width = self.shape
        with _open(self.path(split, index)) as picture:
            upright = _as_mode(ImageOps.exif_transpose(picture), _MODES[channels])
            tile = ImageOps.fit(upright, (width, height), Resampling.BILINEAR)
        pixels = np.asarray(tile, dtype=np.float32).reshape(height, width, channels)
        return ((pixels - np.float32(_MIDDLE)) / np.float32(_SPREAD)).transpose(2, 0, 1)

    def _label(self, split: Split, index: int) -> int:
        return self._files[split][index][1]


def check(data: DataConfig) -> None:
    """Raise ConfigError for a missing folder or another number of classes than it holds; opens no image."""
    if data.channels not in _MODES:
        raise ConfigError("data.channels", data.channels, "image files give 1 (grey), 3 (colour) or 4 (with alpha)")
    root = _root(data)
    if _has_split(root):
        names = _class_names(root / "train")
        strays = set(_class_names(root / "validation")) - set(names)
        if strays:
            raise ConfigError("data.path", data.path, f"train/ lacks classes of validation/: {_listed(strays)}")
    else:
        names = _class_names(root)
    if len(names) != data.num_classes:
        found = f"the folder has {len(names)} classes ({_listed(names)})" if names else "the folder has no classes"
        advice = f"set data.num_classes={len(names)}" if len(names) > 1 else f"lay files out as {_LAYOUTS}"
        raise ConfigError("data.num_classes", data.num_classes, found, advice)


def _root(data: DataConfig) -> Path:
    if data.path is None:
        raise ConfigError("data.path", None, "data=folder needs a directory of images", f"lay it out as {_LAYOUTS}")
    root = Path(data.path).expanduser()
    if not root.is_dir():
        raise ConfigError("data.path", data.path, "no such directory", f"lay it out as {_LAYOUTS}")
    return root


def _has_split(root: Path) -> bool:
    present = [name for name in ("train", "validation") if (root / name).is_dir()]
    if len(present) == 1:
        raise ConfigError("data.path", root, f"it has {present[0]}/ but not the other split", f"expected {_LAYOUTS}")
    return bool(present)


def _split(data: DataConfig, seed: int) -> dict[Split, Files]:
    root = _root(data)
    files: dict[Split, Files] = {"train": [], "validation": []}
    if _has_split(root):
        names = _class_names(root / "train")
        for split, found in files.items():
            found += [(path, label) for label, name in enumerate(names) for path in _files_of(root / split / name)]
        return files
    share = data.validation_samples / (data.train_samples + data.validation_samples)
    for label, name in enumerate(_class_names(root)):
        paths = _files_of(root / name)
        num_validation = min(max(round(share * len(paths)), 1), len(paths) - 1) if len(paths) > 1 and share else 0
        held_out = set(generator(seed, "split", label).permutation(len(paths))[:num_validation].tolist())
        for number, path in enumerate(paths):
            files["validation" if number in held_out else "train"].append((path, label))
    return files


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))


def _problem(path: Path) -> str:
    """Report what is wrong with an image file, in one line, or nothing when it is sound."""
    try:
        with _open(path) as picture:
            if picture.mode in ("I", "F"):
                return f"its mode {picture.mode} has no known range; use 8 or 16 bits a channel"
            if picture.format == "PNG":
                picture.verify()
            else:
                # Other formats carry no checksums, so Pillow's verify() would pass a truncated file.
                picture.draft("L", (1, 1))
                picture.load()
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _open(path: Path) -> Picture:
    import PIL.Image

    # Pillow guards web services against huge uploads; here huge images are the point, and the user's own.
    PIL.Image.MAX_IMAGE_PIXELS = None
    return PIL.Image.open(path)


def _as_mode(picture: Picture, mode: str) -> Picture:
    from PIL.Image import fromarray

    if picture.mode.startswith("I;16"):
        picture = fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return picture if picture.mode == mode else picture.convert(mode)


def _listed(names: list[str] | set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


DATASETS.register("folder", Source(FolderDataset, check, counts_itself=True))

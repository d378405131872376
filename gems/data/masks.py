"""Images and masks with the class of each pixel, in two folders with equal file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.data.dataset import Box, Label, Split, Tokens, as_label, as_mask
from gems.data.files.paths import data_folder, files_below, split_folders
from gems.data.files.reader import gives_mask_parts, read_mask, read_mask_part
from gems.data.images import KEYS, FileDataset, image_source
from gems.data.splits import split_indices
from gems.errors import ConfigError

_LAYOUTS = "PATH/images/* and PATH/masks/*, or both in PATH/train and PATH/validation (or val)"

Pair = tuple[Path, Path]


@image_source(
    "masks", tasks=("segmentation",), keys=(*KEYS, "split_path", "class_map", "ignore_label")
)
class MaskDataset(FileDataset):
    """Images in PATH/images and masks in PATH/masks with the same stems.

    If the data are split, both folders are in train/ and validation/. A mask contains the class
    number of each pixel, or a value that data.class_map maps to it. Pixels with the value
    data.ignore_label are ignored.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        check_values_of_map(data)
        root = data_folder(data, _LAYOUTS)
        folders = split_folders(root, "images", _LAYOUTS)
        if folders is None:
            whole = _pairs_of(root, data)
            pairs: dict[Split, list[Pair]] = {
                split: [whole[index] for index in indices]
                for split, indices in split_indices(data, len(whole), seed).items()
            }
        else:
            pairs = {split: _pairs_of(folder, data) for split, folder in folders.items()}
        super().__init__(
            data, {split: [image for image, _ in found] for split, found in pairs.items()}, seed
        )
        self._masks = {split: [mask for _, mask in found] for split, found in pairs.items()}
        self._masks_by_rows: dict[Split, bool] = {}

    def files(self) -> list[Path]:
        """Return all files that the dataset reads."""
        return [*super().files(), *(mask for masks in self._masks.values() for mask in masks)]

    def examine(self, split: Split, index: int) -> None:
        """Read an image and its mask completely.

        Raises:
            ConfigError: They would be misread.
        """
        super().examine(split, index)
        self._examine_label(split, index)

    def reads_mask_rows(self, split: Split) -> bool:
        """Return whether parts of all images and masks can be read."""
        if split not in self._masks_by_rows:
            self._masks_by_rows[split] = self.reads_rows(split) and all(
                gives_mask_parts(path, self.config) for path in self._masks[split]
            )
        return self._masks_by_rows[split]

    def _label(self, split: Split, index: int) -> Label:
        path = self._masks[split][index]
        image = self.path(split, index)
        mask = mapped(read_mask(path, self.config, image), self.config.class_map)
        return self._without_nodata(
            as_label(mask, self.config, "segmentation", str(path)), split, index
        )

    def _mask(self, split: Split, index: int, box: Box) -> Tokens:
        path = self._masks[split][index]
        part = read_mask_part(path, self.config, (box.rows, box.columns))
        classes = as_mask(mapped(part, self.config.class_map), self.config, str(path))
        return cast(Tokens, self._without_nodata(classes, split, index, box))


def mapped(mask: NDArray[Any], class_map: dict[str, int]) -> NDArray[Any]:
    """Return a mask with the values in data.class_map replaced by their classes."""
    if not class_map:
        return mask
    classes = mask.copy()
    for value, number in class_map.items():
        classes[mask == int(value)] = number
    return classes


def check_values_of_map(data: DataConfig) -> None:
    """Raise ConfigError if data.class_map has names, although the labels are numbers."""
    wrong = [value for value in data.class_map if not value.isdecimal()]
    if wrong:
        advice = "the labels are numbers, as in {255:1}"
        raise ConfigError("data.class_map", data.class_map, f"names {wrong[0]}", advice)


def _pairs_of(folder: Path, data: DataConfig) -> list[Pair]:
    """Return each image of a folder with its mask."""
    images, masks = (_by_stem(folder / name, data) for name in ("images", "masks"))
    for here, other, name in ((images, masks, "mask"), (masks, images, "image")):
        lonely = sorted(set(here) - set(other))
        if lonely:
            raise ConfigError(
                "data.path", data.path, f"{here[lonely[0]]} has no {name} of the same name"
            )
    return [(images[stem], masks[stem]) for stem in sorted(images)]


def _by_stem(folder: Path, data: DataConfig) -> dict[str, Path]:
    if not folder.is_dir():
        raise ConfigError(
            "data.path", data.path, f"has no folder {folder}", f"lay it out as {_LAYOUTS}"
        )
    return {str(path.relative_to(folder).with_suffix("")): path for path in files_below(folder)}

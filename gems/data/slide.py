"""Regions of whole-slide images.

Only the pixels of a sample's region are read, at the required level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.data.dataset import Box, Image, Split, Tokens
from gems.data.files.paths import expanded
from gems.data.files.reader import MODES
from gems.data.files.values import Values
from gems.data.images import ImageDataset, image_source, stamps
from gems.data.pyramid import (
    SAME_SCALE,
    Handles,
    Slide,
    library,
    read_bands,
    read_facts,
    tissue_mask,
)
from gems.data.table import Record, Records, class_numbers, read_records, split_records
from gems.data.tissue import TISSUE_SLIDE, tissue_slide
from gems.errors import ConfigError
from gems.utils.cache import cached

KEYS = (
    "level",
    "mpp",
    "coords_path",
    "region",
    "tissue_share",
    "labels_path",
    "image_column",
    "class_map",
    "normalization",
    "mean",
    "std",
    "transform",
    "transform_kwargs",
)
LABELS = "labels.csv"
# suffixes of files that a table may name without their suffix
SUFFIXES = (
    ".svs",
    ".tif",
    ".tiff",
    ".ndpi",
    ".mrxs",
    ".scn",
    ".vms",
    ".vmu",
    ".svslide",
    ".bif",
    ".dcm",
    ".czi",
)
_COORDS = "coords"
_ATTRIBUTES = ("patch_size", "patch_level", "patch_size_level0")
_CHANNELS = (1, 3)

# (regions, 2): x and y of the upper left corners, in level-0 pixels
Corners = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Regions:
    """The regions of a record of the table.

    It has the corners on a slide, and the number of level-0 pixels per side of a sample's pixel.
    """

    slide: Slide
    downsample: float
    corners: Corners


@image_source("slide", keys=KEYS)
class SlideDataset(ImageDataset):
    """Regions of the slides in a table, each with the label of its record.

    The regions come from data.coords_path, from the columns x and y of the table, or from a grid
    over data.region or the tissue. All regions of a slide are in one split, unless the table
    divides them. Each process opens the slides that it reads, on first use. Rows of pixels are
    normalised band by band into the sample; nothing else is held whole.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        records = _checked_records(data)
        names = [record["label"] for record in records]
        self.class_numbers = class_numbers(data, names, str(_labels_path(data)), is_table=True)
        places = dict(zip(map(id, records), _regions(data, records), strict=True))
        self._regions: dict[Split, list[_Regions]] = {}
        # (samples, 2): the record, and the region in it
        self._places: dict[Split, NDArray[np.int64]] = {}
        self._labels: dict[Split, NDArray[np.int64]] = {}  # of each record
        for split, chosen in _split(data, records, seed).items():
            regions = [places[id(record)] for record in chosen]
            counts = np.array([len(region.corners) for region in regions], dtype=np.int64)
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            self._regions[split] = regions
            self._labels[split] = np.array(
                [self.class_numbers[record["label"]] for record in chosen], dtype=np.int64
            )
            self._places[split] = np.stack(
                [np.repeat(np.arange(len(regions)), counts), np.arange(counts.sum()) - starts],
                axis=1,
            ).astype(np.int64)
            if not len(self._places[split]) and (split == "validation" or self.needs_training):
                advice = "add slides, or a column split to the table"
                raise ConfigError(
                    "data.labels_path",
                    str(_labels_path(data)),
                    f"no region is left for {split}",
                    advice,
                )
        self._handles = Handles()
        super().__init__(data, len(self._places["train"]), len(self._places["validation"]), seed)

    def name_of(self, split: Split, index: int) -> str:
        """Return the slide of a sample and its corner, as text."""
        region, (x, y) = self._place(split, index)
        return f"{region.slide.path} at x={x}, y={y}"

    def box(self, split: Split, index: int) -> tuple[Slide, tuple[float, float, float, float]]:
        """Return the slide of a sample and its region: x, y, width and height in level-0 pixels."""
        region, (x, y) = self._place(split, index)
        _, height, width = self.shape
        return region.slide, (x, y, width * region.downsample, height * region.downsample)

    def reads_rows(self, split: Split) -> bool:
        """Return whether parts of regions can be read; a transform needs whole regions."""
        return not self._is_transformed(split)

    def _has_bytes(self, split: Split) -> bool:
        return True

    def image(self, split: Split, index: int, draw: int = 0) -> Image | Tokens:
        """Return one sample as `ImageDataset.image` does.

        Its bands are written directly to their places after a flip or turn.
        """
        if not self.reads_rows(split):
            return super().image(split, index, draw)
        return self.rows(split, index, draw, 0, self.shape[1])

    def values(self, split: Split, index: int) -> Values:
        """Return the bytes of a region."""
        return self.part(split, index, Box(*(slice(0, side) for side in self.shape[1:])))

    def part(self, split: Split, index: int, box: Box) -> Values:
        """Return the bytes of a part of a region."""
        sides = (side.stop - side.start for side in box)
        part = np.empty((self.shape[0], *sides), dtype=np.uint8)
        for rows, band in self._bands(split, index, box):
            part[:, rows] = band
        return part

    def identity(self, split: Split) -> str:
        """Return the names, sizes and times of a split's slides, and a digest of its regions."""
        regions = self._regions[split]
        digest = sha256()
        for region in regions:
            digest.update(
                f"{region.downsample} {len(region.corners)} ".encode() + region.corners.tobytes()
            )
        return f"{stamps([region.slide.path for region in regions])} {digest.hexdigest()}"

    def class_counts(self, split: Split) -> tuple[int, ...]:
        """Return the number of regions of each class."""
        labels = self._labels[split][self._places[split][:, 0]]
        return tuple(np.bincount(labels, minlength=self.num_classes).tolist())

    def _label(self, split: Split, index: int) -> int:
        return int(self._labels[split][self._places[split][index, 0]])

    def _place(self, split: Split, index: int) -> tuple[_Regions, tuple[int, int]]:
        record, region = self._places[split][index].tolist()
        found = self._regions[split][record]
        x, y = found.corners[region].tolist()
        return found, (x, y)

    def _write(self, split: Split, index: int, box: Box, out: Image) -> None:
        for rows, band in self._bands(split, index, box):
            self._normalised(band, out=out[:, rows])

    def _bands(self, split: Split, index: int, box: Box) -> Iterator[tuple[slice, Values]]:
        """Yield the rows and values of each band of a part of a region, from top to bottom."""
        from PIL.Image import fromarray

        found, corner = self._place(split, index)
        first = box.rows.start
        with self._handles.opened(found.slide.path) as handle:
            for rows, band in read_bands(
                handle, found.slide, corner, found.downsample, self.shape[1:], box
            ):
                here = slice(rows.start - first, rows.stop - first)
                if self.shape[0] == 1:
                    yield here, np.asarray(fromarray(band).convert(MODES[1]))[np.newaxis]
                else:
                    yield here, band.transpose(2, 0, 1)


@image_source("unlabelled_slide", keys=KEYS, labelled=False)
class UnlabelledSlides(SlideDataset):
    """The slides of a table for prediction: a validation split whose labels have no meaning."""

    needs_training = False


def _root(data: DataConfig) -> Path:
    """Return the folder of the slides, or the only slide."""
    if data.path == TISSUE_SLIDE:
        return tissue_slide()
    root = None if data.path is None else expanded("data.path", data.path)
    if root is None or not root.exists():
        advice = (
            f"give a folder of slides, or one slide; {TISSUE_SLIDE} is a small one made from"
            " scikit-image's picture"
        )
        raise ConfigError("data.path", data.path, "no such folder or file", advice)
    return root


def _labels_path(data: DataConfig) -> Path:
    if data.labels_path is not None:
        return expanded("data.labels_path", data.labels_path)
    root = _root(data)
    return (root if root.is_dir() else root.parent) / LABELS


def _checked_records(data: DataConfig) -> Records:
    """Return the records of the table of labels.

    Raises:
        ConfigError: Keys contradict each other, or the table lacks something that they need.
    """
    library()
    if data.channels not in _CHANNELS:
        raise ConfigError(
            "data.channels", data.channels, "slides have 3 channels (colour), or 1 (grey)"
        )
    if data.region is not None and (len(data.region) != 4 or not all(data.region[2:])):
        raise ConfigError(
            "data.region", data.region, "must be [x,y,width,height], in pixels of level 0"
        )
    key = "data.labels_path"
    path = str(_labels_path(data))
    records = read_records(key, path, [data.image_column, "label"])
    is_listed = "x" in records[0] and "y" in records[0]
    scales = [
        ("data.level", data.level),
        ("data.mpp", data.mpp),
        ("data.coords_path", data.coords_path),
    ]
    places = [
        ("data.coords_path", data.coords_path),
        ("data.region", data.region),
        ("columns x and y of the table", "given" if is_listed else None),
    ]
    for subject, keys in (("scale", scales), ("place", places)):
        keys_set = [(name, value) for name, value in keys if value is not None]
        if len(keys_set) > 1:
            text = f"cannot be combined with {keys_set[1][0]}, as both say the {subject} of regions"
            raise ConfigError(keys_set[0][0], keys_set[0][1], text, "use one of them")
    if data.coords_path is not None and data.height_px != data.width_px:
        text = (
            f"is not data.width_px={data.width_px}, and the patches of data.coords_path are square"
        )
        raise ConfigError("data.height_px", data.height_px, text, "set both alike")
    for line, record in enumerate(records, start=2):
        if is_listed and not (record["x"].isdecimal() and record["y"].isdecimal()):
            text = f"line {line} has x={record['x']}, y={record['y']}"
            raise ConfigError(key, path, text, "must be whole numbers, in pixels of level 0")
    names = [record[data.image_column] for record in records]
    if not is_listed and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            key, path, f"names {twice} twice", "one row a slide, or add columns x and y"
        )
    return records


def _split(data: DataConfig, records: Records, seed: int) -> dict[Split, Records]:
    """Return the records of each split.

    Records of a slide stay together unless the table divides them.
    """
    if "split" in records[0]:
        return split_records(data, "data.labels_path", records, [], seed)
    firsts: dict[str, Record] = {}
    for record in records:
        firsts.setdefault(record[data.image_column], record)
    slides = list(firsts.values())
    by_split = split_records(
        data, "data.labels_path", slides, [record["label"] for record in slides], seed
    )
    names = {
        split: {record[data.image_column] for record in chosen}
        for split, chosen in by_split.items()
    }
    return {
        split: [record for record in records if record[data.image_column] in chosen]
        for split, chosen in names.items()
    }


def _regions(data: DataConfig, records: Records) -> list[_Regions]:
    """Return the regions of each record.

    Raises:
        ConfigError: A slide is missing, cannot be read, or lacks the level, the microns per pixel
            or the region.
    """
    root = _root(data)
    by_stem: dict[str, list[Path]] = {}
    slides: dict[str, Slide] = {}
    regions = []
    for record in records:
        name = record[data.image_column]
        if name not in slides:
            slides[name] = read_facts(_slide_path(data, root, name, by_stem))
        slide = slides[name]
        if data.coords_path is not None:
            regions.append(_from_coords(data, slide))
            continue
        downsample = _downsample(data, slide)
        if "x" in record and "y" in record:
            corners = np.array([[int(record["x"]), int(record["y"])]], dtype=np.int64)
            _check_inside(
                slide,
                "data.labels_path",
                str(_labels_path(data)),
                corners[0].tolist(),
                _side_px(data, downsample),
            )
        else:
            corners = _grid(data, slide, downsample)
        regions.append(_Regions(slide, downsample, corners))
    return regions


def _slide_path(data: DataConfig, root: Path, name: str, by_stem: dict[str, list[Path]]) -> Path:
    """Return the file of a slide in the table, named with or without its suffix.

    `by_stem` is filled when needed.
    """
    folder = root if root.is_dir() else root.parent
    if (folder / name).is_file():
        return folder / name
    if not by_stem:
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() in SUFFIXES:
                by_stem.setdefault(path.stem, []).append(path)
    paths = by_stem.get(name, [])
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise ConfigError(
            "data.path",
            data.path,
            f"has {len(paths)} slides called {name}",
            "name them with folder and suffix",
        )
    text = f"names {name}, and there is no such slide in {folder}"
    raise ConfigError(
        "data.labels_path",
        str(_labels_path(data)),
        text,
        "correct the table, data.path or data.image_column",
    )


def _downsample(data: DataConfig, slide: Slide) -> float:
    """Return the level-0 pixels per side of a sample's pixel, by data.level or data.mpp."""
    if data.mpp is None:
        number = data.level or 0
        if number >= len(slide.levels):
            raise ConfigError(
                "data.level", number, f"{slide.path} has levels 0 to {len(slide.levels) - 1}"
            )
        return slide.levels[number].downsample
    if slide.mpp is None:
        text = f"{slide.path} does not say its microns per pixel"
        raise ConfigError("data.mpp", data.mpp, text, "use data.level, or record them in the file")
    if data.mpp < slide.mpp * (1 - SAME_SCALE):
        raise ConfigError(
            "data.mpp",
            data.mpp,
            f"{slide.path} has {slide.mpp:g} at its finest",
            f"set {slide.mpp:g} or more",
        )
    return data.mpp / slide.mpp


def _side_px(data: DataConfig, downsample: float) -> tuple[float, float]:
    """Return the width and height of a region at level 0."""
    return data.width_px * downsample, data.height_px * downsample


def _check_inside(
    slide: Slide, key: str, value: object, corner: list[int], side_px: tuple[float, float]
) -> None:
    x, y = corner
    width = slide.levels[0].width_px
    height = slide.levels[0].height_px
    if x + floor(side_px[0]) > width or y + floor(side_px[1]) > height:
        text = (
            f"a region of {side_px[0]:.0f} x {side_px[1]:.0f} px at x={x}, y={y} is not inside"
            f" {slide.path}"
        )
        raise ConfigError(key, value, text, f"which has {width} x {height} px at level 0")


def _from_coords(data: DataConfig, slide: Slide) -> _Regions:
    """Return the patches that TRIDENT or CLAM wrote for a slide."""
    import h5py

    root = expanded("data.coords_path", str(data.coords_path))
    stem = slide.path.stem
    tried = [root] if root.is_file() else [root / f"{stem}.h5", root / f"{stem}_patches.h5"]
    path = next((candidate for candidate in tried if candidate.is_file()), None)
    if path is None:
        text = f"has no coords of slide {stem}"
        raise ConfigError(
            "data.coords_path", data.coords_path, text, f"expected {' or '.join(map(str, tried))}"
        )
    try:
        with h5py.File(path, "r") as file:
            if _COORDS not in file:
                raise ConfigError(
                    "data.coords_path",
                    path,
                    f"has no dataset {_COORDS}",
                    f"it has {', '.join(file) or 'none'}",
                )
            corners = np.asarray(file[_COORDS], dtype=np.int64).reshape(-1, 2)
            said = {
                name: round(float(np.asarray(value).item()))
                for name, value in file[_COORDS].attrs.items()
                if name in _ATTRIBUTES and np.size(value) == 1
            }
    except (OSError, ValueError) as error:
        raise ConfigError(
            "data.coords_path", path, f"no readable file of coords ({error})"
        ) from error
    side = _patch_side_px(path, slide, said)
    outside = corners[
        (corners < 0).any(1)
        | (corners >= [slide.levels[0].width_px, slide.levels[0].height_px]).any(1)
    ]
    if len(outside):
        x, y = outside[0].tolist()
        raise ConfigError(
            "data.coords_path", path, f"has a patch at x={x}, y={y}, which is outside {slide.path}"
        )
    return _Regions(slide, side / data.height_px, corners)


def _patch_side_px(path: Path, slide: Slide, said: dict[str, int]) -> float:
    """Return the side of a patch at level 0, from TRIDENT's attribute or CLAM's level."""
    if "patch_size_level0" in said:
        return said["patch_size_level0"]
    if not {"patch_size", "patch_level"} <= said.keys():
        text = "does not say the size of patches"
        advice = (
            "coords has an attribute patch_size_level0 (TRIDENT), or patch_size and patch_level"
            " (CLAM)"
        )
        raise ConfigError("data.coords_path", path, text, advice)
    if said["patch_level"] >= len(slide.levels):
        text = (
            f"is of level {said['patch_level']}, and {slide.path} has levels 0 to"
            f" {len(slide.levels) - 1}"
        )
        raise ConfigError("data.coords_path", path, text)
    return said["patch_size"] * slide.levels[said["patch_level"]].downsample


def _grid(data: DataConfig, slide: Slide, downsample: float) -> Corners:
    """Return the regions of a grid over data.region or the tissue.

    Regions with too little tissue are left out.
    """
    side_px = _side_px(data, downsample)
    whole = slide.levels[0]
    if data.region is not None:
        x, y, width, height = data.region
        _check_inside(slide, "data.region", data.region, [x, y], (width, height))
        corners = _corners((x, y, width, height), side_px)
        if not len(corners):
            text = f"is less than a sample, {side_px[0]:.0f} x {side_px[1]:.0f} px at level 0"
            raise ConfigError(
                "data.region", data.region, text, "give a larger one, or a finer data.level"
            )
        return corners
    if side_px[0] > whole.width_px + 1 or side_px[1] > whole.height_px + 1:
        sides = f"{slide.path} has {whole.width_px} x {whole.height_px} px at level 0"
        text = f"{sides}, and a sample takes {side_px[0]:.0f} x {side_px[1]:.0f}"
        advice = "use smaller samples, or a finer data.level or data.mpp"
        raise ConfigError("data.height_px", data.height_px, text, advice)
    if not data.tissue_share:
        return _corners((0, 0, whole.width_px, whole.height_px), side_px)

    def make() -> dict[str, Any]:
        return {"corners": _tissue_corners(slide, side_px, data.tissue_share).tolist()}

    key = repr((library().__name__, stamps([slide.path]), side_px, data.tissue_share))
    grid = cached(None, "slide_regions", key, make)
    return np.array(grid["corners"], dtype=np.int64).reshape(-1, 2)


def _corners(box: tuple[int, int, int, int], side_px: tuple[float, float]) -> Corners:
    """Return the corners of all regions that fit into a box (x, y, width, height), row by row."""
    columns, rows = (
        int(length / side + 1e-6) for length, side in zip(box[2:], side_px, strict=True)
    )
    corners = [
        (box[0] + round(n * side_px[0]), box[1] + round(m * side_px[1]))
        for m in range(rows)
        for n in range(columns)
    ]
    return np.array(corners, dtype=np.int64).reshape(-1, 2)


def _tissue_corners(slide: Slide, side_px: tuple[float, float], share: float) -> Corners:
    """Return the regions over the bounding box of the tissue that contain at least a share of it.

    A box smaller than a region gives one region, with the box in its middle as far as the slide
    extends.
    """
    mask, scale = tissue_mask(slide)
    if not mask.any():
        raise ConfigError(
            "data.tissue_share",
            share,
            f"{slide.path} shows no tissue",
            "set it to 0 for regions of all",
        )
    whole = slide.levels[0].width_px, slide.levels[0].height_px
    begin = []
    length = []
    for axis, side, most in zip((0, 1), side_px, whole, strict=True):
        seen = np.flatnonzero(mask.any(axis=axis))
        first = int(seen[0] * scale)
        end = min(ceil((seen[-1] + 1) * scale), most)
        count = max(1, int((end - first) / side + 1e-6))
        if end - first < side:
            first = max(0, min(round((first + end - side) / 2), floor(most - side)))
        begin.append(first)
        length.append(ceil(count * side))
    corners = _corners((begin[0], begin[1], length[0], length[1]), side_px)
    if len(corners) == 1:
        return corners
    shares = []
    for x, y in corners.tolist():
        rows, columns = (
            slice(int(first / scale), max(int(first / scale) + 1, round((first + side) / scale)))
            for first, side in ((y, side_px[1]), (x, side_px[0]))
        )
        shares.append(mask[rows, columns].mean())
    return corners[np.array(shares) >= share]

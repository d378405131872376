"""Real histology: tiles of the immunohistochemistry image in the scikit-image wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.config.schema import DataConfig
from gems.data.dataset import DATASETS, Dataset, Image, Label, Source, Split, generator
from gems.errors import ConfigError
from gems.utils.atomic_io import atomic_write
from gems.utils.cache import cache_folder

TASKS = ("classification", "segmentation")
SLIDE_PX = 512
TRAIN_COLUMNS_PX = 358
MAX_FIELD_PX = 128
_DERIVED_FIELD_PX = 64
_MODES = {1: "L", 3: "RGB"}
_VALIDATION_SEED = 0
# the pyramid that `tissue_slide` writes; its name changes with its content
TISSUE_SLIDE = "tissue"
_FOLDER = "tissue-slide-1"
_ENLARGED = 4
_DOWNSAMPLES = (1, 2, 4)
_TILE_PX = (256, 256)
_NUM_REGIONS: dict[Split, int] = {"train": 256, "validation": 64}


# columns of the slide: the first, and the end
COLUMNS_PX: dict[Split, tuple[int, int]] = {
    "train": (0, TRAIN_COLUMNS_PX),
    "validation": (TRAIN_COLUMNS_PX, SLIDE_PX),
}


class TissueDataset(Dataset):
    """Tiles of a colon section stained by immunohistochemistry (hematoxylin and DAB).

    The class is stained (1) or not (0). Colour deconvolution (Ruifrok and Johnston 2001) gives the
    DAB density. A pixel is positive above Otsu's threshold of the training region; a tile is
    stained if its share of positive pixels is above Otsu's threshold of the shares in that region.
    Training tiles are in the left 70 % of the columns, validation tiles in the rest; no tile
    crosses the border. Positions are random, half of them on stained tissue. Training positions
    depend on the seed; validation positions never change, so accuracies of different seeds are
    comparable. `data.field_of_view_px` source pixels on the longer side are resampled to the tile.
    For data.task=segmentation the label is the mask of positive pixels.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        from skimage.color import rgb2hed
        from skimage.filters import threshold_otsu

        otsu: Any = threshold_otsu
        shape = (data.channels, *data.sides_px)
        super().__init__(shape, 2, data.train_samples, data.validation_samples, seed, data.augment)
        self.slide = read_slide()
        self.field_shape_px = field_shape_px(data)
        density = rgb2hed(self.slide)[:, :, 2]
        known = density[:, :TRAIN_COLUMNS_PX]
        # A few specks ten times as dark as any tissue would stretch the histogram that Otsu's
        # method uses.
        self.pixel_threshold = float(otsu(np.minimum(known, np.quantile(known, 0.999))))
        self.is_positive = density > self.pixel_threshold
        self._has_masks = data.task == "segmentation"
        share = _window_means(self.is_positive, self.field_shape_px)
        self.share_threshold = float(otsu(self._inside(share, "train")))
        self._positions: dict[Split, NDArray[np.int64]] = {}
        self._labels: dict[Split, NDArray[np.int64]] = {}
        splits: tuple[tuple[Split, int], ...] = (("train", seed), ("validation", _VALIDATION_SEED))
        for split, split_seed in splits:
            self._choose(split, split_seed, self._inside(share, split) > self.share_threshold)
        pixels = np.asarray(
            self._resample(self.slide[:, :TRAIN_COLUMNS_PX], None), dtype=np.float64
        )
        self._mean = pixels.mean(axis=(0, 1)).astype(np.float32)
        self._deviation = pixels.std(axis=(0, 1)).astype(np.float32)

    def position_px(self, split: Split, index: int) -> tuple[int, int]:
        """Return the row and column, in the slide, of the first pixel of a tile's field of view."""
        top, left = self._positions[split][index]
        return int(top), int(left)

    def _inside(self, share: NDArray[np.float64], split: Split) -> NDArray[np.float64]:
        """Return the shares of the fields that lie completely in the split's region."""
        left, right = COLUMNS_PX[split]
        return share[:, left : right - self.field_shape_px[1] + 1]

    def _choose(self, split: Split, seed: int, stained: NDArray[np.bool_]) -> None:
        num_images = self.num_images(split)
        rng = generator(seed, split)
        places = [np.argwhere(stained == wanted) for wanted in (False, True)]
        chosen = rng.permutation(np.arange(num_images) % 2)
        if not all(map(len, places)):
            chosen[:] = int(len(places[1]) > 0)
        positions = np.empty((num_images, 2), dtype=np.int64)
        for label, available in enumerate(places):
            here = chosen == label
            if here.any():
                positions[here] = available[rng.integers(len(available), size=int(here.sum()))]
        self._labels[split] = chosen
        self._positions[split] = positions + np.array([0, COLUMNS_PX[split][0]])

    def _pixels(self, split: Split, index: int) -> Image:
        top, left = self.position_px(split, index)
        height, width = self.field_shape_px
        tile = self._resample(
            self.slide[top : top + height, left : left + width], (self.shape[1], self.shape[2])
        )
        normalised = (np.asarray(tile, dtype=np.float32) - self._mean) / self._deviation
        channels_first: Image = normalised.transpose(2, 0, 1)
        return channels_first

    def _label(self, split: Split, index: int) -> Label:
        if not self._has_masks:
            return int(self._labels[split][index])
        top, left = self.position_px(split, index)
        # the source pixel that contains the middle of each pixel of the tile
        rows, columns = (
            first + (2 * np.arange(side_px) + 1) * field_px // (2 * side_px)
            for first, side_px, field_px in zip(
                (top, left), self.shape[1:], self.field_shape_px, strict=True
            )
        )
        mask: NDArray[np.int64] = self.is_positive[np.ix_(rows, columns)].astype(np.int64)
        return mask

    def _resample(
        self, pixels: NDArray[np.uint8], shape_px: tuple[int, int] | None
    ) -> NDArray[np.uint8]:
        """Return bytes (height, width, channels), resampled bilinearly and smoothed if shrunk."""
        from PIL.Image import Resampling, fromarray

        picture = fromarray(np.ascontiguousarray(pixels)).convert(_MODES[self.shape[0]])
        if shape_px is not None and shape_px != pixels.shape[:2]:
            picture = picture.resize(shape_px[::-1], Resampling.BILINEAR)
        return np.asarray(picture).reshape(picture.height, picture.width, self.shape[0])


def check(data: DataConfig) -> None:
    """Raise ConfigError for channels, classes or a field of view that the slide does not have."""
    if data.channels not in _MODES:
        raise ConfigError(
            "data.channels", data.channels, "tissue has 3 channels (colour), or 1 (grey)"
        )
    if data.num_classes != 2:
        raise ConfigError(
            "data.num_classes", data.num_classes, "tissue has 2 classes: stained or not"
        )
    if data.field_of_view_px is not None and not 8 <= data.field_of_view_px <= MAX_FIELD_PX:
        text = f"a field of view has 8 to {MAX_FIELD_PX} source pixels on its longer side"
        advice = "a larger tile needs no larger field: it is resampled"
        raise ConfigError("data.field_of_view_px", data.field_of_view_px, text, advice)


def field_of_view_px(data: DataConfig) -> int:
    """Return `data.field_of_view_px`.

    If it is None, return the tile's longer side, limited to 8 to 64 source pixels.
    """
    if data.field_of_view_px is not None:
        return data.field_of_view_px
    return min(max(data.height_px, data.width_px, 8), _DERIVED_FIELD_PX)


def field_shape_px(data: DataConfig) -> tuple[int, int]:
    """Return height and width of the field of view in source pixels, in proportion to the tile."""
    longer = max(data.height_px, data.width_px)
    height, width = (
        max(1, round(field_of_view_px(data) * side / longer))
        for side in (data.height_px, data.width_px)
    )
    return height, width


def read_slide() -> NDArray[np.uint8]:
    """Return the slide, bytes of shape (512, 512, 3), from the installed wheel, never the network.

    Raises:
        ConfigError: The installed scikit-image lacks the slide.
    """
    import PIL.Image
    import skimage

    path = Path(skimage.__file__).parent / "data" / "ihc.png"
    advice = "install scikit-image from its wheel, or choose data=synthetic or data=folder"
    try:
        with PIL.Image.open(path) as picture:
            slide = np.asarray(picture.convert("RGB"))
    except OSError as error:
        raise ConfigError(
            "data.name", "tissue", f"the slide cannot be read: {error}", advice
        ) from error
    if slide.shape != (SLIDE_PX, SLIDE_PX, 3):
        raise ConfigError(
            "data.name", "tissue", f"{path} has shape {slide.shape}, not 512x512 in colour", advice
        )
    return slide


def tissue_slide() -> Path:
    """Return a folder of the cache with slide.tif and labels.csv, written on first use.

    The slide is the picture enlarged to 2048 x 2048 px, a tiled TIFF file of three levels. The
    table has regions of 256 px at level 0, stained or not; the validation regions are to the right
    of the training regions.
    """
    import tifffile
    from PIL.Image import Resampling, fromarray

    folder = cache_folder() / _FOLDER
    if (folder / "labels.csv").exists():
        return folder
    sides = (_DERIVED_FIELD_PX, _DERIVED_FIELD_PX)
    data = DataConfig(
        name="tissue",
        height_px=sides[0],
        width_px=sides[1],
        train_samples=_NUM_REGIONS["train"],
        validation_samples=_NUM_REGIONS["validation"],
    )
    dataset = TissueDataset(data, _VALIDATION_SEED)
    picture = fromarray(dataset.slide)
    rows = ["file,label,split,x,y"]
    for split, count in _NUM_REGIONS.items():
        for index in range(count):
            top, left = dataset.position_px(split, index)
            label = dataset.label(split, index)
            rows.append(f"slide.tif,{label},{split},{left * _ENLARGED},{top * _ENLARGED}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "slide.tif") as path, tifffile.TiffWriter(path) as file:
            for downsample in _DOWNSAMPLES:
                side_px = SLIDE_PX * _ENLARGED // downsample
                pixels = np.asarray(picture.resize((side_px, side_px), Resampling.BICUBIC))
                file.write(
                    pixels,
                    photometric="rgb",
                    tile=_TILE_PX,
                    compression="zlib",
                    subfiletype=int(downsample > 1),
                )
        with atomic_write(folder / "labels.csv") as path:
            path.write_text("\n".join(rows) + "\n")
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror})"
        raise ConfigError(
            "data.path", TISSUE_SLIDE, text, "set GEMS_CACHE_DIR to another folder"
        ) from error
    return folder


def _window_means(mask: NDArray[np.bool_], shape_px: tuple[int, int]) -> NDArray[np.float64]:
    """Return the share of true pixels in each window that fits, indexed by its first pixel.

    The shares are computed from an integral image.
    """
    height, width = shape_px
    total = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), dtype=np.int64)
    total[1:, 1:] = mask.cumsum(axis=0).cumsum(axis=1)
    inside = (
        total[height:, width:]
        - total[:-height, width:]
        - total[height:, :-width]
        + total[:-height, :-width]
    )
    return inside / (height * width)


DATASETS.register("tissue", Source(TissueDataset, check, field_of_view_px, tasks=TASKS))

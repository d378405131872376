"""Sources of images and tokens by name (no torch here: arrays are numpy's)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gems.config.fields import check_fields
from gems.config.schema import DataConfig
from gems.data import folder, synthetic, tissue, tokens
from gems.data.dataset import Dataset, Image, Split, Tokens
from gems.errors import ConfigError, nearest, one_of

__all__ = [
    "SOURCES",
    "Dataset",
    "Image",
    "Source",
    "Split",
    "Tokens",
    "check_data",
    "kind_of",
    "labels_per_sample",
    "open_dataset",
    "register",
    "resolve_data",
    "sample_shape",
    "sources_of",
]

IMAGES = "images"


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of data set: `check` raises ConfigError without decoding an image, `open` reads what it must.

    `field_of_view_px` derives data.field_of_view_px where the source has such a thing. `kind` says what a sample is, as the families
    of models do: images, tokens (one sequence) or token_pairs (a sequence and its translation).
    """

    open: Callable[[DataConfig, int], Dataset]
    check: Callable[[DataConfig], None] = lambda data: None
    field_of_view_px: Callable[[DataConfig], int | None] = lambda data: data.field_of_view_px
    kind: str = IMAGES


SOURCES: dict[str, Source] = {}


def register(name: str, source: Source) -> None:
    """Add a source under `name`; raises ValueError when the name is taken by another one."""
    if SOURCES.setdefault(name, source) is not source:
        raise ValueError(f"a data source named {name!r} is registered already")


def check_data(data: DataConfig) -> None:
    """Raise ConfigError for data that cannot be opened, as far as can be told without decoding an image."""
    check_fields(data, "data.")
    _source(data).check(data)


def resolve_data(data: DataConfig) -> DataConfig:
    """Return a copy of `data` with the fields that None leaves to the source filled in."""
    return replace(data, field_of_view_px=_source(data).field_of_view_px(data))


def open_dataset(data: DataConfig, seed: int) -> Dataset:
    """Open the configured data set; the same (data, seed) gives the same images and labels on every rank.

    Raises ConfigError as `check_data`, and for a bad image file, which it names.
    """
    check_data(data)
    return _source(data).open(data, seed)


def kind_of(data: DataConfig) -> str:
    """Return what a sample is: images, tokens or token_pairs."""
    return _source(data).kind


def sources_of(kind: str) -> list[str]:
    """Return the names of the sources whose samples are of a kind."""
    return sorted(name for name, source in SOURCES.items() if source.kind == kind)


def sample_shape(data: DataConfig) -> tuple[int, ...]:
    """Return the shape of one sample: (channels, height, width) of an image, (length,) or (2, length) of tokens."""
    if kind_of(data) == IMAGES:
        return data.channels, data.height_px, data.width_px
    return tokens.shape_of(kind_of(data), data.length)


def labels_per_sample(data: DataConfig) -> int:
    """Return how many labels a sample has: one for an image, one for each place of a sequence of tokens."""
    return 1 if kind_of(data) == IMAGES else data.length


def _source(data: DataConfig) -> Source:
    if data.name not in SOURCES:
        raise ConfigError(
            "data.name", data.name, one_of(sorted(SOURCES)), f"nearest: {', '.join(nearest(data.name, SOURCES))}"
        )
    return SOURCES[data.name]


register("synthetic", Source(open=synthetic.SyntheticDataset))
register("tissue", Source(open=tissue.TissueDataset, check=tissue.check, field_of_view_px=tissue.field_of_view_px))
register("folder", Source(open=folder.FolderDataset, check=folder.check))
register("tokens", Source(open=tokens.TokenDataset, kind=tokens.TOKENS))
register("token_pairs", Source(open=tokens.TokenPairDataset, kind=tokens.TOKEN_PAIRS))

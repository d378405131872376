"""The networks of published tables, and the settings of torchgpipe's benchmarks that tables omit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate

from analysis.outside.table import Row
from gems.errors import ConfigError
from gems.memory.policies.recompute import least_largest
from gems.profile import ModelProfile

_UNET_LEVELS = 5  # of all U-Nets of torchgpipe's benchmarks
_FORMS = (
    (
        re.compile(r"U-Net \((\d+) convs a block, (\d+) channels, depth (\d+)\)"),
        "model=unet_simplified model.convs={} model.width={} model.depth={}",
    ),
    (
        re.compile(r"U-Net \((\d+), (\d+)\)"),
        f"model=unet_simplified model.convs={{}} model.width={{}} model.depth={_UNET_LEVELS}",
    ),
    (
        re.compile(r"AmoebaNet-D \((\d+), (\d+)\)"),
        "model=amoebanet_d model.version=2 model.depth={} model.width={}",
    ),
    (re.compile(r"ResNet-(18|34|50|101|152)\b"), "model=resnet{}"),
    (re.compile(r"VGG-?(16)\b"), "model=vgg{}"),
)
_DENSE = "data.task=segmentation data.num_classes=2"
_MACHINES = ("p40", "v100", "a100", "h100", "h200")
# Children a partition and micro-batches by model and partitions, where a row lacks them. Source:
# benchmarks/unet-memory, amoebanetd-memory and unet-timeline of torchgpipe 0.0.7.
_SETTINGS: dict[tuple[str, int], tuple[tuple[int, ...], int]] = {
    ("U-Net (6, 72)", 1): ((285,), 1),
    ("U-Net (11, 128)", 1): ((505,), 32),
    ("U-Net (24, 128)", 2): ((526, 551), 32),
    ("U-Net (24, 160)", 4): ((472, 54, 36, 515), 32),
    ("U-Net (48, 160)", 8): ((800, 140, 62, 36, 36, 36, 36, 987), 128),
    ("AmoebaNet-D (18, 416)", 1): ((24,), 128),
    ("AmoebaNet-D (18, 544)", 2): ((16, 8), 128),
    ("AmoebaNet-D (36, 544)", 4): ((16, 12, 7, 7), 128),
    ("AmoebaNet-D (72, 512)", 8): ((23, 16, 11, 6, 6, 5, 5, 6), 128),
    ("U-Net (5 convs a block, 64 channels, depth 5)", 4): ((34, 76, 70, 61), 8),
}


def overrides_of(row: Row) -> tuple[str, ...]:
    """Return the overrides that configure the network of a row and its images.

    Raises:
        ConfigError: The network is unknown.
    """
    for form, words in _FORMS:
        match = form.match(row.model.strip())
        if match:
            dense = _DENSE if "unet" in words else "data.num_classes=1000"
            sides = f"data.height_px={row.image_px} data.width_px={row.image_px}"
            text = f"data=synthetic {words.format(*match.groups())} {dense} {sides}"
            return tuple(text.split())
    raise ConfigError(
        "model",
        row.model or "none",
        f"of row {row.name} is unknown",
        "allowed: U-Net (B, C), U-Net (B convs a block, C channels, depth D), AmoebaNet-D (L, F),"
        " ResNet-N, VGG-16",
    )


def machine_of(row: Row) -> str | None:
    """Return the preset of a row's accelerator, or None if it is not stated or has none."""
    words = row.accelerator.lower()
    return next((name for name in _MACHINES if name in words), None)


def settings_of(row: Row) -> tuple[tuple[int, ...] | None, int | None]:
    """Return the children a partition and the micro-batches of a row, where they are known."""
    name = row.model.split("),")[0].rstrip(")") + ")"
    cuts, micro_batches = _SETTINGS.get((name, row.partitions), (None, None))
    return row.cuts or cuts, row.micro_batches or micro_batches


def boundaries_of(
    profile: ModelProfile, cuts: Sequence[int] | None, partitions: int
) -> tuple[int, ...]:
    """Return the boundaries of a row's stages, as layers of the profile.

    Without cuts, the slowest stage is as fast as possible. Children that are not the profile's
    layers give cuts at the same shares of the network.

    Raises:
        ConfigError: There are more partitions than layers, or another number of cuts.
    """
    num_layers = profile.num_layers
    if partitions > num_layers or (cuts is not None and len(cuts) != partitions):
        stated = "+".join(map(str, cuts or ())) or partitions
        text = f"must be {partitions} partitions of the {num_layers} layers of {profile.model}"
        raise ConfigError("partitions", stated, text)
    if cuts is None:
        times = [round(1e9 * layer.time_s) for layer in profile.layers]
        ends = list(least_largest(times, partitions))
        while len(ends) < partitions:  # fewer runs were enough
            ends = sorted({*ends, max(set(range(1, num_layers)) - set(ends))})
        return (0, *ends)
    share = num_layers / sum(cuts)
    inner = [max(1, math.floor(share * end + 0.5)) for end in accumulate(cuts)]
    return (0, *inner)

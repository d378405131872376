"""AmoebaNet-D as named layers, in the layout that GPipe trains.

Source: Real et al. 2018 (arXiv 1802.01548). The stem is one 3x3 convolution and two reduction
cells. Three stages of L/3 normal cells follow, with a reduction cell between stages. A cell reads
the outputs of the two cells before it, so two tensors cross most boundaries. The cells of the three
stages have F, 2F and 4F filters. Huang et al. 2019 (arXiv 1811.06965, table 1) write a network as
(L, F), with L = `model.depth` and F = `model.width`. The normal cell joins the states 0, 3, 4 and
6, as the reference implementation does, instead of all unused ones, as the paper draws it; so (18,
208) has the 82 M parameters that GPipe reports. With `model.version` 2, 3x3 poolings average, as
torchgpipe 0.0.7 builds the network.
"""

from __future__ import annotations

from typing import NamedTuple

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models.families.shared import check_classifier, pooled_head
from gems.models.layer import MODELS, Layer, ModelFamily, block

Term = tuple[str, int]
Pairs = tuple[tuple[Term, Term], ...]


class Genotype(NamedTuple):
    """The operations of a cell.

    A new state is the sum of a pair of operations on earlier states: state 0 is the output of the
    last cell, state 1 that of the cell before it. The cell concatenates the states in `joined`.
    """

    pairs: Pairs
    joined: tuple[int, ...]
    stride: int


NORMAL = Genotype(
    pairs=(
        (("conv1x1", 1), ("max3x3", 1)),
        (("none", 1), ("conv1x7_7x1", 0)),
        (("conv1x1", 0), ("conv1x7_7x1", 0)),
        (("max3x3", 2), ("none", 2)),
        (("average3x3", 1), ("conv1x1", 5)),
    ),
    joined=(0, 3, 4, 6),
    stride=1,
)
REDUCTION = Genotype(
    pairs=(
        (("max2x2", 0), ("max3x3", 0)),
        (("none", 2), ("conv3x3", 1)),
        (("conv1x7_7x1", 2), ("max3x3", 2)),
        (("none", 3), ("max2x2", 1)),
        (("average3x3", 2), ("conv1x1", 3)),
    ),
    joined=(4, 5, 6),
    stride=2,
)


def averaging(genotype: Genotype) -> Genotype:
    """Return a genotype whose 3x3 max poolings average instead."""
    names = {"max3x3": "average3x3"}
    pairs = tuple(
        ((names.get(left, left), state), (names.get(right, right), other))
        for (left, state), (right, other) in genotype.pairs
    )
    return genotype._replace(pairs=pairs)


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return the layers of AmoebaNet-D, from the stem to the head.

    They are stem.conv, stem.reduction1, stem.reduction2, stage1.cell1, ..., reduction1, ...,
    stage3.cellN, head.

    Raises:
        ConfigError: The depth is no multiple of 3, the width is no multiple of 8, or norm is none.
    """
    _check(model)
    stages = [
        [f"stage{stage}.cell{number + 1}" for number in range(model.depth // 3)]
        for stage in (1, 2, 3)
    ]
    names = [
        "stem.reduction1",
        "stem.reduction2",
        *stages[0],
        "reduction1",
        *stages[1],
        "reduction2",
        *stages[2],
    ]
    channels = model.width >> 2
    stem = {"in_channels": data.channels, "out_channels": channels, "norm": model.norm}
    out = [block("stem.conv", "conv", "cells:CellStem", **stem)]
    before = channels
    last = channels
    was_reduction = False
    for index, name in enumerate(names):
        is_reduction = "reduction" in name
        channels = 2 * channels if is_reduction else channels
        genotype = REDUCTION if is_reduction else NORMAL
        genotype = averaging(genotype) if model.version == 2 else genotype
        cell = block(
            name,
            "reduction" if is_reduction else "cell",
            "cells:Cell",
            channels_before=before,
            channels_last=last,
            channels=channels,
            genotype=genotype,
            is_after_reduction=was_reduction,
            is_last=index == len(names) - 1,
            norm=model.norm,
        )
        out.append(cell)
        before = last
        last = channels * len(genotype.joined)
        was_reduction = is_reduction
    return (*out, pooled_head(model, data, last, norm="none", activate=True))


def _check(model: ModelConfig) -> None:
    check_classifier(model)
    for key, value, unit in (("model.depth", model.depth, 3), ("model.width", model.width, 8)):
        if value < unit or value % unit:
            near = max(unit, value // unit * unit)
            text = f"must be a multiple of {unit} for amoebanet"
            raise ConfigError(key, value, text, f"nearest: {near}, {near + unit}")
    if model.norm == "none":
        text = "amoebanet adds up branches, which only a norm keeps finite"
        raise ConfigError("model.norm", model.norm, text, "set model.norm=batch or group")


# the stem and four reduction cells each halve the feature map, at any depth
MODELS.register("amoebanet", ModelFamily(layers, lambda model: 32, title="{name}{depth}"))

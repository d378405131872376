"""Layers and networks in blocks of images and volumes equal themselves on the whole map.

Outputs, input gradients, parameter gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gems.streaming import StreamingError, stream
from gems.streaming.axis_rules import even_ends
from tests.helpers.strips_rig import DTYPE, TOLERANCE, Function, cut_stages, error
from tests.streaming.test_layers import CHANNELS, HEIGHT, LAYERS, WIDTH
from tests.streaming.test_networks import NETWORKS

Ends = tuple[tuple[int, ...], ...]
Sizes = tuple[int, ...]
quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
NAMES = {2: "2d", 3: "3d"}


@st.composite
def grids(draw: st.DrawFn) -> Ends:
    """The ends of parts of any sizes along the axes of an image or a volume, which may have a fourth."""
    axes = draw(st.sampled_from([2, 2, 3]))
    most = 5 if axes == 2 else 3
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=most)
    return tuple(
        tuple(sum(each[: end + 1]) for end in range(len(each)))
        for each in (draw(sizes) for _ in range(axes))
    )


def options_of(draw: Callable[[Any], Any], axes: int) -> dict[str, Sizes]:
    """Return a geometry that differs between axes."""
    bounds = {"kernel_size": (1, 4), "stride": (1, 3), "padding": (0, 3), "dilation": (1, 2)}
    return {
        name: tuple(draw(st.integers(*bound)) for _ in range(axes))
        for name, bound in bounds.items()
    }


def check(layer: nn.Module, ends: Ends, is_branched: bool = False) -> None:
    """Compare a layer behind a convolution and ReLU, alone or beside a branch of other reach."""
    torch.manual_seed(0)
    axes = len(ends)
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[axes]
    sizes = [each[-1] for each in ends]
    image = torch.randn(2, CHANNELS, *sizes, dtype=DTYPE)
    before = nn.Sequential(conv(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU())
    module = layer
    if is_branched:
        tall = conv(CHANNELS, CHANNELS, (5, *[1] * (axes - 1)), padding=(2, *[0] * (axes - 1)))
        wide = conv(CHANNELS, CHANNELS, (*[1] * (axes - 1), 3), padding=(*[0] * (axes - 1), 1))
        module = Function(
            lambda self, x: (
                self.layer(x),
                torch.cat([self.tall(x) + self.wide(x) + x, torch.sigmoid(x)], 1),
            ),
            layer=layer,
            tall=tall,
            wide=wide,
        )
    layers = [("before", before.to(DTYPE)), ("layer", module.to(DTYPE))]
    assert error(layers, image, [(ends, 1)]) <= TOLERANCE


def fits(layer: nn.Module, ends: Ends) -> bool:
    """Return whether a map is large enough for a layer."""
    try:
        return layer(torch.zeros(1, CHANNELS, *(each[-1] for each in ends))).numel() > 0
    except RuntimeError:
        return False


@quick
@given(grids(), st.data(), st.sampled_from([1, 2]), st.booleans())
def test_convolution(ends: Ends, data: st.DataObject, groups: int, is_branched: bool) -> None:
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[len(ends)]
    layer = conv(CHANNELS, CHANNELS, groups=groups, **options_of(data.draw, len(ends)))
    assume(fits(layer, ends))
    check(layer, ends, is_branched)


@quick
@given(grids(), st.data(), st.integers(0, 1), st.booleans())
def test_transposed_convolution(
    ends: Ends, data: st.DataObject, more: int, is_branched: bool
) -> None:
    options = options_of(data.draw, len(ends))
    least = min(map(max, options["stride"], options["dilation"]))
    conv = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[len(ends)]
    layer = conv(CHANNELS, CHANNELS, output_padding=min(more, least - 1), groups=2, **options)
    assume(fits(layer, ends))
    check(layer, ends, is_branched)


@quick
@given(grids(), st.data(), st.booleans(), st.booleans())
def test_max_pooling(ends: Ends, data: st.DataObject, ceil_mode: bool, is_branched: bool) -> None:
    options = options_of(data.draw, len(ends))
    assume(
        all(map(lambda side, size: side <= size // 2, options["padding"], options["kernel_size"]))
    )
    # torch's own backward writes anywhere if a window steps over the whole map
    assume(all(map(lambda step, each: step <= each[-1], options["dilation"], ends)))
    pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[len(ends)](ceil_mode=ceil_mode, **options)
    assume(fits(pool, ends))
    check(pool, ends, is_branched)


@quick
@given(grids(), st.data(), st.booleans(), st.booleans(), st.sampled_from([None, None, 5]))
def test_average_pooling(
    ends: Ends, data: st.DataObject, ceil_mode: bool, counts: bool, divisor: int | None
) -> None:
    options = options_of(data.draw, len(ends))
    del options["dilation"]
    assume(
        all(map(lambda side, size: side <= size // 2, options["padding"], options["kernel_size"]))
    )
    pool = {2: nn.AvgPool2d, 3: nn.AvgPool3d}[len(ends)](
        ceil_mode=ceil_mode, count_include_pad=counts, divisor_override=divisor, **options
    )
    assume(fits(pool, ends))
    check(pool, ends)


@quick
@given(grids(), st.data())
def test_resampling_and_means(ends: Ends, data: st.DataObject) -> None:
    axes = len(ends)
    linear = {2: "bilinear", 3: "trilinear"}[axes]
    sizes = tuple(data.draw(st.integers(1, 9)) for _ in range(axes))
    dims = data.draw(st.lists(st.sampled_from(range(2, 2 + axes)), min_size=1, unique=True))
    is_kept = data.draw(st.booleans())
    adaptive = {2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[axes]
    layers: list[Callable[[Tensor], Tensor]] = [
        nn.Upsample(scale_factor=2, mode=data.draw(st.sampled_from(["nearest", linear]))),
        nn.Upsample(size=sizes, mode=linear, align_corners=data.draw(st.booleans())),
        adaptive(sizes),
        lambda x: x.mean(dims, keepdim=is_kept),
        lambda x: functional.pad(x, [1, 0] * axes, mode="replicate"),
    ]
    layer = data.draw(st.sampled_from(layers))
    check(layer if isinstance(layer, nn.Module) else Function(lambda self, x: layer(x)), ends)


@pytest.mark.parametrize("name", LAYERS)
def test_other_layers(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]
    module = layer if isinstance(layer, nn.Module) else Function(layer)
    image = torch.randn(2, CHANNELS, HEIGHT, WIDTH, dtype=DTYPE)
    before = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()).to(DTYPE)
    layers = [("before", before), ("layer", module.to(DTYPE))]
    ends = ((4, 5, 6, 14, HEIGHT), (1, 4, 5, WIDTH))
    assert error(layers, image, [(ends, 1), (((HEIGHT,), (3, WIDTH)), 1)]) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "amoebanet"])
def test_networks(name: str) -> None:
    """Blocks that the image's sides are no multiples of, in one stage and in three."""
    torch.manual_seed(0)
    make, height, width = NETWORKS[name]
    image = torch.randn(1, 3, height, width, dtype=DTYPE)
    grids: Sequence[tuple[tuple[int, int], int]] = [((2, 2), 1), ((3, 5), 3), ((7, 2), 1)]
    if name == "inception_v3":
        grids = grids[1:2]
    cases = [
        ((even_ends(height, rows), even_ends(width, columns)), num_stages)
        for (rows, columns), num_stages in grids
    ]
    assert error(make(image), image, cases) <= TOLERANCE


class VolumeNet(nn.Module):
    """A three-dimensional encoder and decoder with a skip, a dilated layer and a global head."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, width, 3, padding=1)
        self.down = nn.Sequential(
            nn.MaxPool3d(2), nn.Conv3d(width, width, 3, padding=2, dilation=2), nn.ReLU()
        )
        self.up = nn.ConvTranspose3d(width, width, 2, stride=2)
        self.head = nn.Linear(width, 3)

    def forward(self, volume: Tensor) -> tuple[Tensor, Tensor]:
        x = functional.relu(self.stem(volume))
        deep = self.down(x)
        return torch.cat([x, self.up(deep)], 1), self.head(deep.mean((2, 3, 4)))


@pytest.mark.parametrize("divisions", [2, [3, 2], [2, 2, 2], [1, 1, 4]])
def test_a_volume_in_blocks(divisions: int | list[int]) -> None:
    """`stream` compares it with itself before it returns."""
    net = VolumeNet().double()
    volume = torch.randn(1, 1, 12, 8, 10, dtype=DTYPE)
    streamed = stream(net, volume, divisions)
    for found, wanted in zip(streamed(volume), net(volume), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-13)


def test_what_blocks_keep_grows_with_their_borders() -> None:
    """Sixteen strips keep fifteen borders of the full width, 4 x 4 blocks three of each side."""
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    image = torch.empty(1, 3, 256, 256)
    kept = []
    for ends in ((even_ends(256, 16),), (even_ends(256, 4), even_ends(256, 4))):
        (stage,) = cut_stages([("a", layer)], image, ends)
        shapes = [shape for strip in range(16) for shape, _ in stage.carries(strip)]
        kept.append(sum(torch.Size(shape).numel() for shape in shapes))
    strips, blocks = kept
    assert strips == 15 * 2 * 256 * (3 + 4)
    # corners are kept twice
    assert blocks <= (6 * 2 * 256 + 9 * 2 * 4) * (3 + 4)


@pytest.mark.parametrize("divisions", [[2, 0], [65, 1], [2, 2, 2], []])
def test_divisions_that_do_not_fit_are_refused(divisions: list[int]) -> None:
    with pytest.raises(StreamingError, match="1 part of an axis to its size"):
        stream(nn.Conv2d(3, 3, 3), torch.empty(1, 3, 64, 64, device="meta"), divisions)

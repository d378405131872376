"""Each kind of layer in strips equals itself on the whole image.

Outputs, input gradients, parameter gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.strips_rig import DTYPE, TOLERANCE, Function, error, freeze

CHANNELS = 4
WIDTH = 7


def fits(layer: nn.Module, height: int) -> bool:
    """Return whether a map of some height is large enough for a layer."""
    try:
        return layer(torch.zeros(1, CHANNELS, height, WIDTH)).numel() > 0
    except RuntimeError:
        return False


quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


@st.composite
def strips(draw: st.DrawFn) -> tuple[int, ...]:
    """The ends of strips of any heights, one row and more."""
    return tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=6).map(_sums)))


def _sums(rows: list[int]) -> list[int]:
    return [sum(rows[: end + 1]) for end in range(len(rows))]


def check(layer: Callable[..., Any], ends: tuple[int, ...], is_branched: bool = False) -> None:
    """Compare a layer behind a convolution and ReLU, alone or beside a residual branch of other reach."""
    torch.manual_seed(0)
    module = (layer if isinstance(layer, nn.Module) else Function(layer)).to(DTYPE)
    image = torch.randn(2, CHANNELS, ends[-1], WIDTH, dtype=DTYPE)
    before = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()).to(DTYPE)
    if is_branched:
        module = Function(
            lambda self, x: (self.layer(x), torch.cat([self.tall(x) + x, torch.sigmoid(x)], 1)),
            layer=module,
            tall=nn.Conv2d(CHANNELS, CHANNELS, (5, 1), padding=(2, 0)).to(DTYPE),
        )
    assert error([("before", before), ("layer", module)], image, [(ends, 1)]) <= TOLERANCE


@quick
@given(
    strips(),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_convolution(
    ends: tuple[int, ...],
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    is_branched: bool,
) -> None:
    options = {
        "stride": (stride, 2),
        "padding": (padding, 1),
        "dilation": (dilation, 1),
        "groups": groups,
    }
    layer = nn.Conv2d(CHANNELS, CHANNELS, (kernel, 3), **options)
    assume(fits(layer, ends[-1]))
    check(layer, ends, is_branched)


@quick
@given(
    strips(),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_transposed_convolution(
    ends: tuple[int, ...],
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    more: int,
    is_branched: bool,
) -> None:
    options = {"stride": (stride, 2), "padding": (padding, 1), "dilation": (dilation, 1)}
    more = min(more, max(stride, dilation) - 1)
    layer = nn.ConvTranspose2d(
        CHANNELS, CHANNELS, (kernel, 3), output_padding=(more, 0), groups=2, **options
    )
    assume(fits(layer, ends[-1]))
    check(layer, ends, is_branched)


@quick
@given(
    strips(),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_max_pooling(
    ends: tuple[int, ...],
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    ceil_mode: bool,
    is_branched: bool,
) -> None:
    assume(padding <= kernel // 2)
    assume(
        dilation <= ends[-1]
    )  # torch's own backward writes anywhere if a window steps over the whole map
    pool = nn.MaxPool2d((kernel, 3), (stride, 2), (padding, 1), (dilation, 1), ceil_mode=ceil_mode)
    assume(fits(pool, ends[-1]))
    check(pool, ends, is_branched)


@quick
@given(
    strips(),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, None, 5]),
)
def test_average_pooling(
    ends: tuple[int, ...],
    kernel: int,
    stride: int,
    padding: int,
    ceil_mode: bool,
    counts_padding: bool,
    divisor: int | None,
) -> None:
    assume(padding <= kernel // 2)
    pool = nn.AvgPool2d((kernel, 3), (stride, 2), (padding, 1), ceil_mode, counts_padding, divisor)
    assume(fits(pool, ends[-1]))
    check(pool, ends)


class StandardisedConv(nn.Conv2d):
    """Weight standardisation (Qiao et al. 2019).

    What the weights are made into depends on no input.
    """

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        var = self.weight.var((1, 2, 3), keepdim=True)
        return functional.conv2d(
            x, (self.weight - mean) / (var + 1e-5).sqrt(), self.bias, padding=1
        )


class ChannelNorm(nn.Module):
    """A norm over channels by hand, as published networks have it."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()


def shuffle_channels(self: nn.Module, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def gate(self: nn.Module, x: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    return left * torch.sigmoid(right)


def in_place(self: nn.Module, x: Tensor) -> Tensor:
    x = x * 2
    x += 1
    return functional.relu_(x)


class Coordinates(nn.Module):
    """Puts fixed coordinates, whole and by row, beside the channels of a map."""

    def __init__(self, height: int) -> None:
        super().__init__()
        rows = torch.linspace(-1, 1, height)[None, None, :, None].expand(1, 1, height, WIDTH)
        self.register_buffer("rows", rows.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.rows.expand(len(x), -1, -1, -1), x, torch.ones_like(x[:, :1])], 1)


class Positions(nn.Module):
    """A learnt map that is added to the rows at its places."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, CHANNELS, height, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places


HEIGHT = 23
LAYERS: dict[str, Callable[..., Any]] = {
    "same_even_kernel": nn.Conv2d(CHANNELS, 3, (4, 2), padding="same", dilation=(2, 1)),
    "depthwise": nn.Conv2d(CHANNELS, CHANNELS, 7, padding=3, groups=CHANNELS),
    "reflected": nn.Conv2d(CHANNELS, 3, 5, padding=2, padding_mode="reflect"),
    "replicated": nn.Conv2d(CHANNELS, 3, 3, padding=1, padding_mode="replicate"),
    "standardised": StandardisedConv(CHANNELS, 3, 3, padding=1),
    "local_response_norm": nn.LocalResponseNorm(3),
    "frozen_batch_norm": freeze(nn.BatchNorm2d(CHANNELS)),
    "channel_norm": ChannelNorm(),
    "layer_norm": nn.Sequential(
        Function(lambda self, x: x.permute(0, 2, 3, 1)),
        nn.LayerNorm(CHANNELS),
        nn.Linear(CHANNELS, 3),
        nn.GELU(),
        Function(lambda self, x: x.permute(0, 3, 1, 2)),
    ),
    "nearest": nn.Upsample(scale_factor=(2, 1.5)),
    "nearest_by_size": nn.Upsample(size=(17, 5)),
    "nearest_exact": nn.Upsample(scale_factor=1.7, mode="nearest-exact"),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear_by_size": nn.Upsample(size=(40, 9), mode="bilinear", align_corners=True),
    "adaptive": nn.AdaptiveAvgPool2d((5, 2)),
    "adaptive_and_conv": nn.Sequential(
        nn.AdaptiveAvgPool2d(6), nn.Conv2d(CHANNELS, 3, 3, padding=1), nn.Flatten()
    ),
    "global_mean": Function(lambda self, x: x.mean((2, 3))),
    "global_mean_kept": Function(lambda self, x: x.mean((2, 3), keepdim=True) * 2),
    "global_sum": Function(lambda self, x: x.sum((-2, -1)).log_softmax(1)),
    "mean_of_columns": Function(lambda self, x: x.mean(2)),
    "head": nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 3), nn.ReLU(inplace=True)
    ),
    "flattened": nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * HEIGHT * WIDTH, 3)),
    "dense_head": nn.Sequential(nn.Conv2d(CHANNELS, 3, 1), nn.LogSoftmax(1)),
    "shuffled_channels": Function(shuffle_channels),
    "gate": Function(gate),
    "in_place": Function(in_place),
    "positions": Positions(HEIGHT),
    "coordinates": Coordinates(HEIGHT),
    "padded": Function(lambda self, x: functional.pad(x, (1, 0, 3, 2), value=0.5)),
    "shifted": Function(lambda self, x: functional.pad(x, (-1, 1, -1, 1))),
    "cropped": Function(lambda self, x: x[:, 1:, 2:-3, 1:]),
    "subsampled": Function(lambda self, x: functional.pad(x[:, :, ::3, ::2], (0, 0, 0, 0, 0, 2))),
    "pixel_shuffle": nn.PixelShuffle(2),
    "product": Function(lambda self, x: functional.avg_pool2d(x, 5, 1, 2) * x),
    "largest_channels": Function(
        lambda self, x: (x.max(1, keepdim=True)[0] + x.topk(2, 1)[0], x.logsumexp(1))
    ),
    "larger": Function(lambda self, x: torch.max(x, functional.avg_pool2d(x, 3, 1, 1))),
    "difference": Function(lambda self, x: x - functional.avg_pool2d(x, 3, 1, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_other_layers(name: str) -> None:
    check(LAYERS[name], (4, 5, 6, 14, HEIGHT))
    check(LAYERS[name], tuple(range(1, HEIGHT + 1)))


def test_a_square_map_is_not_mixed_up() -> None:
    """Rows, columns and channels of the same number: what is by channel must not be cut by rows."""
    torch.manual_seed(0)
    turn = Function(lambda self, x: x.permute(0, 3, 2, 1))
    norm = nn.Sequential(
        turn,
        nn.LayerNorm(8),
        turn,
        Function(lambda self, x: x * self.module.weight.view(-1, 1, 1), module=nn.PReLU(8)),
        freeze(nn.BatchNorm2d(8)),
    )
    layers = [("a", nn.Conv2d(8, 8, 3, padding=1).to(DTYPE)), ("b", norm.to(DTYPE))]
    assert error(layers, torch.randn(8, 8, 8, 8, dtype=DTYPE), [((3, 4, 8), 1)]) <= TOLERANCE

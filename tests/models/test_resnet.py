"""ResNets: parameter counts, depths, blocks and shortcuts, all from layers as data."""

from __future__ import annotations

import pytest

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import layers_of
from tests.helpers.zoo import num_parameters


def basic_v1_parameters(depth: int, width: int, channels: int, num_classes: int) -> int:
    """Parameters of version 1 with basic blocks and parameter-free shortcuts.

    W = width, n blocks a stage.
    Convolutions: stem 9cw; a block of f filters 18 f^2, but the first of stages 2 and 3 13.5 f^2,
    for it reads half as many channels: in all 378 n w^2 - 90 w^2. Batch norms: 2w + 4n(w + 2w +
    4w). Linear: 4wk + k.
    """
    n = (depth - 2) // 6
    w = width
    convolutions = 9 * channels * w + 378 * n * w**2 - 90 * w**2
    return convolutions + 2 * w + 28 * n * w + 4 * w * num_classes + num_classes


def bottleneck_v2_parameters(depth: int, width: int, channels: int, num_classes: int) -> int:
    """Parameters of a version 2 ResNet of bottleneck blocks with 1x1 projections where the width changes.

    Convolutions: stem 9cw; a block of f inner filters 17 f^2 (4 + 9 + 4); with its projection the
    first block of stage 1 has 18 w^2 and those of stages 2 and 3 23 f^2: in all 357 n w^2 + 121
    w^2. Batch norms: a block 12f (its input's 4f, f, f, two numbers a channel), the first blocks 6w
    and 8f, the head 32w: in all 84nw + 2w. Linear: 16wk + k.
    """
    n = (depth - 2) // 9
    w = width
    convolutions = 9 * channels * w + 357 * n * w**2 + 121 * w**2
    return convolutions + 84 * n * w + 2 * w + 16 * w * num_classes + num_classes


@pytest.mark.parametrize(
    ("depth", "published"),
    [(20, 0.27e6), (32, 0.46e6), (44, 0.66e6), (56, 0.85e6), (110, 1.7e6), (1202, 19.4e6)],
)
def test_version_1_has_the_published_parameters(depth: int, published: float) -> None:
    count = num_parameters(ModelConfig(depth=depth), DataConfig(num_classes=10))
    assert count == basic_v1_parameters(depth, 16, 3, 10)
    assert count == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("depth", "published"), [(164, 1.7e6), (1001, 10.2e6)])
def test_version_2_has_the_published_parameters(depth: int, published: float) -> None:
    model = ModelConfig(depth=depth, version=2, block="bottleneck")
    count = num_parameters(model, DataConfig(num_classes=10))
    assert count == bottleneck_v2_parameters(depth, 16, 3, 10)
    assert count == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("channels", "num_classes", "width"), [(1, 2, 16), (5, 7, 8), (3, 1000, 24)]
)
def test_parameters_follow_channels_classes_and_width(
    channels: int, num_classes: int, width: int
) -> None:
    data = DataConfig(channels=channels, num_classes=num_classes)
    basic = num_parameters(ModelConfig(depth=20, width=width), data)
    bottleneck = num_parameters(ModelConfig(depth=29, version=2, width=width), data)
    assert basic == basic_v1_parameters(20, width, channels, num_classes)
    assert bottleneck == bottleneck_v2_parameters(29, width, channels, num_classes)


def test_a_projection_costs_two_convolutions_and_their_norms() -> None:
    data = DataConfig()
    plain = num_parameters(ModelConfig(depth=20), data)
    projected = num_parameters(ModelConfig(depth=20, shortcut="projection"), data)
    width = 16
    assert projected - plain == width * 2 * width + 2 * width * 4 * width + 2 * (
        2 * width + 4 * width
    )


def test_an_identity_shortcut_has_no_parameters_even_where_the_width_grows_fourfold() -> None:
    data = DataConfig()
    projected = num_parameters(ModelConfig(depth=29, version=2), data)
    plain = num_parameters(ModelConfig(depth=29, version=2, shortcut="identity"), data)
    width = 16
    convolutions = [(width, 4 * width), (4 * width, 8 * width), (8 * width, 16 * width)]
    assert projected - plain == sum(before * after for before, after in convolutions)


def test_without_norm_each_convolution_has_a_bias() -> None:
    data = DataConfig(channels=3, num_classes=10)
    n = 3
    width = 16
    convolutions = 27 * width + 378 * n * width**2 - 90 * width**2
    biases = width + 2 * n * (width + 2 * width + 4 * width)
    assert (
        num_parameters(ModelConfig(depth=20, norm="none"), data)
        == convolutions + biases + 40 * width + 10
    )


def test_layers_are_named_and_a_residual_block_is_one_layer() -> None:
    layers = layers_of(ModelConfig(depth=20), DataConfig())
    names = [layer.name for layer in layers]
    blocks = [f"stage{stage}.block{block}" for stage in (1, 2, 3) for block in (1, 2, 3)]
    assert names == ["stem", *blocks, "head"]
    assert [layer.kind for layer in layers] == ["conv", *["residual"] * 9, "head"]
    assert len({hash(layer) for layer in layers}) == len({*layers})


@pytest.mark.parametrize(
    ("depth", "version", "block", "num_layers", "bottleneck"),
    [
        (110, 1, "auto", 2 + 54, False),
        (110, 2, "auto", 2 + 36, True),
        (110, 2, "basic", 2 + 54, False),
        (164, 1, "bottleneck", 2 + 54, True),
        (1001, 1, "auto", 2 + 333, True),
        (1001, 2, "auto", 2 + 333, True),
        (32, 2, "auto", 2 + 15, False),
        (8, 1, "auto", 2 + 3, False),
    ],
)
def test_depth_and_version_choose_the_block(
    depth: int, version: int, block: str, num_layers: int, bottleneck: bool
) -> None:
    layers = layers_of(ModelConfig(depth=depth, version=version, block=block), DataConfig())
    assert len(layers) == num_layers
    assert all(dict(layer.options)["bottleneck"] is bottleneck for layer in layers[1:-1])


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        (
            {"depth": 21},
            "model.depth",
            ["6n+2 (basic)", "9n+2 (bottleneck)", "nearest: 20, 26, 29"],
        ),
        ({"depth": 21, "block": "basic"}, "model.depth", ["6n+2 (basic)", "nearest: 20, 26"]),
        (
            {"depth": 110, "version": 2, "block": "bottleneck", "width": 0},
            "model.width",
            ["at least 1"],
        ),
        (
            {"depth": 1000, "block": "bottleneck"},
            "model.depth",
            ["9n+2 (bottleneck)", "nearest: 992, 1001"],
        ),
        ({"depth": 2}, "model.depth", ["n >= 1", "nearest: 8, 11, 14"]),
        ({"depth": -5}, "model.depth", ["n >= 1"]),
        ({"version": 3}, "model.version", ["allowed: 1, 2"]),
        ({"block": "wide"}, "model.block", ["auto, basic, bottleneck"]),
        ({"shortcut": "none"}, "model.shortcut", ["auto, identity, projection"]),
        ({"norm": "local"}, "model.norm", ["batch, ghost_batch, frozen_batch, group, layer, none"]),
    ],
)
def test_an_impossible_network_is_refused_with_what_is_allowed(
    changes: dict[str, object], key: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of(ModelConfig(**changes), DataConfig())  # type: ignore[arg-type]
    assert caught.value.key == key
    for word in words:
        assert word in str(caught.value)

"""Parameter counts of the image classifiers at 1000 classes, each from the definition written beside it."""

from __future__ import annotations

import pytest

from gems.config.schema import DataConfig
from tests.helpers.zoo import num_parameters, published

VGG_GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def conv(before: int, after: int, taps: int) -> int:
    """A convolution with bias."""
    return (before * taps + 1) * after


def linear(before: int, after: int) -> int:
    return (before + 1) * after


def vgg(more: int, norm: bool = False, channels: int = 3) -> int:
    """VGG-16 with `more` convolutions in each group.

    A norm has two numbers a channel in the place of the bias.
    """
    total = 0
    before = channels
    for width, convs in VGG_GROUPS:
        for _ in range(convs + more):
            total += conv(before, width, 9) + (width if norm else 0)
            before = width
    return total + linear(512 * 49, 4096) + linear(4096, 4096) + linear(4096, 1000)


def googlenet() -> int:
    """Szegedy et al. 2014, table 1.

    Three convolutions, nine blocks of 1x1 | 1x1 3x3 | 1x1 5x5 | pool 1x1, one map.
    """
    table = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )
    total = conv(3, 64, 49) + conv(64, 64, 1) + conv(64, 192, 9)
    before = 192
    for one, three_in, three, five_in, five, pooled in table:
        total += conv(before, one, 1) + conv(before, three_in, 1) + conv(three_in, three, 9)
        total += conv(before, five_in, 1) + conv(five_in, five, 25) + conv(before, pooled, 1)
        before = one + three + five + pooled
    return total + linear(before, 1000)


def test_alexnet() -> None:
    """Count the parameters of Krizhevsky 2014.

    It has 64, 192, 384, 256, 256 filters of 11, 5, 3, 3, 3 px a side, then 6x6x256 - 4096 - 4096 -
    1000.
    """
    definition = conv(3, 64, 121) + conv(64, 192, 25) + conv(192, 384, 9) + conv(384, 256, 9)
    definition += (
        conv(256, 256, 9) + linear(256 * 36, 4096) + linear(4096, 4096) + linear(4096, 1000)
    )
    assert num_parameters(published("alexnet")) == definition == 61_100_840


def test_overfeat() -> None:
    """Sermanet et al. 2013, table 1.

    96, 256, 512, 1024, 1024 filters of 11, 5, 3, 3, 3, then 6x6 - 3072 - 4096.
    """
    definition = conv(3, 96, 121) + conv(96, 256, 25) + conv(256, 512, 9) + conv(512, 1024, 9)
    definition += (
        conv(1024, 1024, 9) + linear(1024 * 36, 3072) + linear(3072, 4096) + linear(4096, 1000)
    )
    assert num_parameters(published("overfeat")) == definition == 145_920_872


@pytest.mark.parametrize(
    ("preset", "more", "count"),
    [
        ("vgg16", 0, 138_357_544),
        ("vgg116", 20, 248_241_704),
        ("vgg216", 40, 358_125_864),
        ("vgg316", 60, 468_010_024),
        ("vgg416", 80, 577_894_184),
    ],
)
def test_vgg(preset: str, more: int, count: int) -> None:
    """Each hundred convolutions of vDNN's networks are twenty in each of the five groups."""
    model = published(preset)
    assert num_parameters(model) == vgg(more) == count
    assert model.depth == 16 + 5 * more


@pytest.mark.parametrize(
    ("depth", "count"), [(11, 132_863_336), (13, 133_047_848), (19, 143_667_240)]
)
def test_the_other_published_depths_of_vgg(depth: int, count: int) -> None:
    assert num_parameters(published("vgg16", depth=depth)) == count


def test_vgg_with_batch_norm_trades_each_bias_for_a_scale_and_a_shift() -> None:
    assert num_parameters(published("vgg16", norm="batch")) == vgg(0, norm=True)
    assert vgg(0, norm=True) - vgg(0) == 4224


def test_googlenet() -> None:
    assert num_parameters(published("googlenet")) == googlenet() == 6_998_552


def test_inception_v3() -> None:
    """The released model has 23 817 352 trainable parameters and no scale in its 17 216 normed channels; ours has both.

    The auxiliary classifier: 1x1 to 128, 5x5 to 768, both with batch norm and no bias, and a linear
    map.
    """
    main = num_parameters(published("inception_v3"))
    assert main == 23_817_352 + 17_216
    auxiliary = 768 * 128 + 2 * 128 + 128 * 768 * 25 + 2 * 768 + linear(768, 1000)
    assert (
        num_parameters(published("inception_v3", auxiliary=True)) == main + auxiliary == 27_161_264
    )


@pytest.mark.parametrize(
    ("depth", "blocks", "expansion", "count"),
    [
        (18, (2, 2, 2, 2), 1, 11_689_512),
        (34, (3, 4, 6, 3), 1, 21_797_672),
        (50, (3, 4, 6, 3), 4, 25_557_032),
        (101, (3, 4, 23, 3), 4, 44_549_160),
        (152, (3, 8, 36, 3), 4, 60_192_808),
    ],
)
def test_resnet_for_imagenet(
    depth: int, blocks: tuple[int, ...], expansion: int, count: int
) -> None:
    """He et al. 2015, table 1, with projections where the shape changes.

    Each norm has two numbers a channel.
    """
    total = 147 * 64 + 128
    before = 64
    for stage, num_blocks in enumerate(blocks):
        inner = 64 << stage
        after = inner * expansion
        for index in range(num_blocks):
            if expansion == 1:
                total += 9 * before * inner + 9 * inner * inner + 4 * inner
            else:
                total += before * inner + 9 * inner * inner + inner * after + 4 * inner + 2 * after
            if not index and before != after:
                total += before * after + 2 * after
            before = after
    assert num_parameters(published(f"resnet{depth}")) == total + linear(before, 1000) == count


def test_normalizer_free_resnet() -> None:
    """Each convolution has a gain and a bias for each channel, as many numbers as a norm behind it."""
    assert (
        num_parameters(published("nf_resnet50"))
        == num_parameters(published("resnet50"))
        == 25_557_032
    )


@pytest.mark.parametrize(
    ("size", "width", "blocks", "count"),
    [
        ("tiny", 96, (3, 3, 9, 3), 28_589_128),
        ("small", 96, (3, 3, 27, 3), 50_223_688),
        ("base", 128, (3, 3, 27, 3), 88_591_464),
        ("large", 192, (3, 3, 27, 3), 197_767_336),
    ],
)
def test_convnext(size: str, width: int, blocks: tuple[int, ...], count: int) -> None:
    """Liu et al. 2022, section 3: depthwise 7x7, to 4 times the width and back.

    A norm has two numbers a channel.
    """
    total = conv(3, width, 16) + 2 * width
    for stage, num_blocks in enumerate(blocks):
        now = width << stage
        if stage:
            total += now + conv(now // 2, now, 4)
        total += num_blocks * (
            50 * now + 2 * now + linear(now, 4 * now) + linear(4 * now, now) + now
        )
    assert (
        num_parameters(published(f"convnext_{size}"))
        == total + 2 * now + linear(now, 1000)
        == count
    )


@pytest.mark.parametrize(
    ("preset", "width"),
    [("alexnet", 64), ("vgg16", 64), ("googlenet", 64), ("inception_v3", 32), ("resnet50", 64)],
)
def test_twice_the_width_has_four_times_the_weights_between_hidden_channels(
    preset: str, width: int
) -> None:
    """Only input, classes, biases and norms grow twofold, so the count grows a little less than fourfold."""
    single, double = (num_parameters(published(preset, width=factor * width)) for factor in (1, 2))
    assert 3.2 * single < double < 4 * single


def test_channels_and_classes_reach_first_and_last_layer() -> None:
    model = published("vgg16", width=8)
    few, many = (
        num_parameters(model, DataConfig(channels=channels, num_classes=classes))
        for channels, classes in ((1, 2), (4, 7))
    )
    assert many - few == 3 * 8 * 9 + 5 * (64 * 8 + 1)

"""Parameter counts of the image classifiers at 1000 classes."""

from __future__ import annotations

import pytest

from gems.config.schema import DataConfig
from tests.helpers.zoo import num_parameters, published

# by the papers' tables, with a bias for each convolution or two numbers a channel for its norm;
# torchvision's alexnet, vgg16, resnets and convnexts have the same counts
PUBLISHED = {
    "alexnet": 61_100_840,
    "overfeat": 145_920_872,
    "vgg16": 138_357_544,
    "vgg116": 248_241_704,
    "vgg216": 358_125_864,
    "vgg316": 468_010_024,
    "vgg416": 577_894_184,
    "googlenet": 6_998_552,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "nf_resnet50": 25_557_032,  # a gain and a bias in the place of a norm's two numbers
    "convnext_tiny": 28_589_128,
    "convnext_small": 50_223_688,
    "convnext_base": 88_591_464,
    "convnext_large": 197_767_336,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_of_the_published_networks(preset: str) -> None:
    assert num_parameters(published(preset)) == PUBLISHED[preset]


@pytest.mark.parametrize(
    ("depth", "count"), [(11, 132_863_336), (13, 133_047_848), (19, 143_667_240)]
)
def test_the_other_published_depths_of_vgg(depth: int, count: int) -> None:
    assert num_parameters(published("vgg16", depth=depth)) == count


def test_vgg_with_batch_norm_trades_each_bias_for_a_scale_and_a_shift() -> None:
    channels = 2 * 64 + 2 * 128 + 3 * 256 + 6 * 512
    count = num_parameters(published("vgg16", norm="batch"))
    assert count == PUBLISHED["vgg16"] + channels


def test_inception_v3() -> None:
    """The released model has 23 817 352 trainable parameters and no scale in its 17 216 normed channels; ours has both.

    The auxiliary classifier: 1x1 to 128, 5x5 to 768, both with batch norm and no bias, and a linear
    map.
    """
    main = num_parameters(published("inception_v3"))
    assert main == 23_817_352 + 17_216
    auxiliary = 768 * 128 + 2 * 128 + 128 * 768 * 25 + 2 * 768 + 769 * 1000
    count = num_parameters(published("inception_v3", auxiliary=True))
    assert count == main + auxiliary == 27_161_264


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

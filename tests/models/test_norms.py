"""The norms of `model.norm` beside their definitions, and the variance of a signal without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gems.config.schema import DataConfig
from gems.models import layers_of
from gems.models.blocks.parts import (
    RELU_GAIN,
    ScaledStdConv2d,
    freeze_batch_norms,
    ghost_batch_norms,
    norm2d,
)
from gems.models.build import build_layer
from gems.models.layer import Layer
from gems.streaming.ghost_norm import GhostBatchNorm2d
from tests.helpers.zoo import published

IMAGES = torch.randn(2, 6, 3, 4, dtype=torch.float64)


def test_frozen_batch_norm_uses_its_running_statistics_in_training_too_and_trains_its_weight() -> (
    None
):
    norm = norm2d("frozen_batch", 6).double()
    norm.running_mean.copy_(torch.arange(6.0))
    norm.running_var.copy_(torch.arange(1.0, 7.0))
    norm.train()
    before = norm.running_mean.clone()
    out = norm(IMAGES)
    wanted = (IMAGES - before[:, None, None]) / (norm.running_var[:, None, None] + norm.eps).sqrt()
    torch.testing.assert_close(out, wanted)
    assert torch.equal(norm.running_mean, before)
    out.sum().backward()
    assert norm.weight.grad is not None and norm.bias.grad is not None


class Activated(nn.BatchNorm2d):
    """A batch norm with an activation, as libraries have them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_the_batch_norms_of_a_network_are_frozen_whatever_their_class() -> None:
    network = nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)), Activated(6), nn.InstanceNorm2d(6)
    )
    names = list(network.state_dict())
    assert freeze_batch_norms(network) == 2 == freeze_batch_norms(network)
    network.double().train()
    assert [module.training for module in network.modules()] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    made = network[1](IMAGES)
    assert made.min() == 0 < made.max()
    network(IMAGES).square().mean().backward()
    assert list(before) == names
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network[1].weight.grad is not None


def test_ghost_batch_norm_is_batch_norm_of_each_strip_and_moves_statistics_by_its_share_of_rows() -> (
    None
):
    norm = norm2d("ghost_batch", 6).double()
    plain = nn.BatchNorm2d(6).double()
    torch.testing.assert_close(norm(IMAGES), plain(IMAGES))
    torch.testing.assert_close(norm.running_var, plain.running_var)
    norm.reset_running_stats()
    norm.row_ends = (0, 1, 1, 3)
    made = norm(IMAGES)
    mean = torch.zeros(6, dtype=torch.float64)
    for begin, end in ((0, 1), (1, 3)):
        rows = IMAGES[:, :, begin:end]
        torch.testing.assert_close(made[:, :, begin:end], nn.BatchNorm2d(6).double()(rows))
        mean += 0.1 * (end - begin) / 3 * (rows.mean((0, 2, 3)) - mean)
    torch.testing.assert_close(norm.running_mean, mean)
    statistics = norm.running_mean.clone()
    by_statistics = (IMAGES - statistics[:, None, None]) / (
        norm.running_var[:, None, None] + norm.eps
    ).sqrt()
    torch.testing.assert_close(norm.eval()(IMAGES), by_statistics)
    assert torch.equal(norm.running_mean, statistics)


def test_the_batch_norms_of_a_network_go_by_strip_but_for_those_of_other_classes_or_without_momentum() -> (
    None
):
    network = nn.Sequential(
        nn.BatchNorm2d(6), Activated(6), nn.BatchNorm2d(6, momentum=None), nn.BatchNorm1d(6)
    )
    assert ghost_batch_norms(network) == 1 and ghost_batch_norms(network) == 0
    assert [isinstance(module, GhostBatchNorm2d) for module in network] == [
        True,
        False,
        False,
        False,
    ]


def test_layer_norm_is_over_the_channels_of_each_pixel() -> None:
    norm = norm2d("layer", 6).double()
    wanted = nn.functional.layer_norm(IMAGES.permute(0, 2, 3, 1), [6], eps=1e-6).permute(0, 3, 1, 2)
    torch.testing.assert_close(norm(IMAGES), wanted)


def test_standardized_weights_have_mean_0_and_the_variance_that_makes_up_for_a_relu() -> None:
    torch.manual_seed(0)
    conv = ScaledStdConv2d(64, 32, scale=RELU_GAIN, kernel_size=3, padding=1)
    nn.init.normal_(conv.weight, mean=3.0, std=0.7)
    nn.init.zeros_(conv.bias)
    with torch.no_grad():
        impulses = torch.eye(64).reshape(64, 64, 1, 1)
        weights = nn.functional.pad(impulses, (1, 1, 1, 1))
        seen = (
            conv(weights).permute(1, 0, 2, 3).flatten(1)
        )  # 3x3 outputs of each impulse: the weights, flipped
        made = conv(torch.randn(4, 64, 16, 16).relu())[:, :, 1:-1, 1:-1]
        conv.gain.mul_(2)
        assert torch.equal(conv(weights).permute(1, 0, 2, 3).flatten(1), 2 * seen)
    torch.testing.assert_close(seen.mean(1), torch.zeros(32), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        seen.var(1, correction=0) * 64 * 9, torch.full((32,), RELU_GAIN**2), rtol=1e-4, atol=0
    )
    assert 0.8 < float(made.var()) < 1.2


def block_variances(layers: Sequence[Layer]) -> list[float]:
    """Return the variance of a channel over images and pixels after each layer at initialization, channels' mean."""
    x: Tensor = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    found = []
    with torch.no_grad():
        for index, layer in enumerate(layers):
            x = build_layer(layer, index, seed=0)(x)
            found.append(float(x.var((0, 2, 3)).mean()))
    return found


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"scales": (1.0, 1.0)}, False),
        ({"scales": (1.0, 1.0), "norm": "none", "num_blocks": 1}, False),
    ],
    ids=["normalizer free", "without scaled branches", "without standardized weights"],
)
def test_the_signal_of_a_normalizer_free_resnet50_keeps_a_variance_of_order_one(
    changes: dict[str, Any], is_kept: bool
) -> None:
    """Through 16 blocks; without what the form consists of it doubles at each."""
    layers = [
        (
            replace(layer, options=tuple((dict(layer.options) | changes).items()))
            if layer.kind == "residual"
            else layer
        )
        for layer in layers_of(published("nf_resnet50", width=16), DataConfig())[:-1]
    ]
    variances = block_variances(layers)
    assert len(variances) == 17
    assert all(0.25 < variance < 4 for variance in variances) == is_kept, variances
    assert is_kept or variances[-1] > 1000 * variances[0]

"""U-Net: its parameters by hand, skips that travel by name, any size, and cuts that change no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gems.autograd.outputs import as_tuple
from gems.config.resolve import resolve
from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.errors import ConfigError
from gems.models import check_image, layers_of
from gems.models.build import boundary_shapes, build_layers
from tests.helpers.cutting import assert_cut_equals_whole
from tests.helpers.zoo import run_all

PUBLISHED = ModelConfig(name="unet", depth=5, width=64, norm="none")
SMALL = ModelConfig(name="unet", depth=4, width=4, norm="none")


def by_hand(levels: int, width: int, channels: int, num_classes: int, norm: str = "none") -> int:
    """Parameters: 3x3 convolutions with bias, or without and two of a norm, 2x2 up-convolutions, a 1x1 convolution."""

    def conv(before: int, after: int) -> int:
        return 9 * before * after + (after if norm == "none" else 2 * after)

    total = 0
    last = channels
    for level in range(levels):
        here = width * 2**level
        total += conv(last, here) + conv(here, here)
        if level + 1 < levels:
            total += 4 * (2 * here) * here + here + conv(2 * here, here) + conv(here, here)
        last = here
    return total + (width + 1) * num_classes


def count(model: ModelConfig, data: DataConfig) -> int:
    layers = layers_of(model, data)
    modules = build_layers(layers, 0, len(layers), 0, device="meta")
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_the_published_network_has_31_million_parameters() -> None:
    """One grey channel and two classes, as in the paper's figure 1."""
    found = count(PUBLISHED, DataConfig(channels=1, num_classes=2))
    assert found == by_hand(5, 64, 1, 2) == 31_030_658


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_norm_takes_the_place_of_the_bias(norm: str) -> None:
    model = ModelConfig(name="unet", depth=3, width=8, norm=norm)
    assert count(model, DataConfig(num_classes=7)) == by_hand(3, 8, 3, 7, norm)


def test_names_and_tensors_between_the_layers() -> None:
    data = DataConfig(num_classes=5)
    layers = layers_of(ModelConfig(name="unet", depth=3, width=4, norm="none"), data)
    shapes = {
        layer.name: [(spec.name.removeprefix(f"{layer.name}."), spec.shape[1:]) for spec in specs]
        for layer, specs in zip(layers, boundary_shapes(layers, (2, 3, 12, 20)), strict=True)
    }
    skip1 = ("skip1", (4, 12, 20))
    skip2 = ("skip2", (8, 6, 10))
    assert shapes == {
        "down1.conv1": [("down1.conv1", (4, 12, 20))],
        "down1.conv2": [("down1.conv2", (4, 12, 20))],
        "down1.pool": [("main", (4, 6, 10)), skip1],
        "down2.conv1": [("main", (8, 6, 10)), skip1],
        "down2.conv2": [("main", (8, 6, 10)), skip1],
        "down2.pool": [("main", (8, 3, 5)), skip1, skip2],
        "bottom.conv1": [("main", (16, 3, 5)), skip1, skip2],
        "bottom.conv2": [("main", (16, 3, 5)), skip1, skip2],
        "up2.widen": [("main", (16, 6, 10)), skip1],
        "up2.conv1": [("main", (8, 6, 10)), skip1],
        "up2.conv2": [("main", (8, 6, 10)), skip1],
        "up1.widen": [("up1.widen", (8, 12, 20))],
        "up1.conv1": [("up1.conv1", (4, 12, 20))],
        "up1.conv2": [("up1.conv2", (4, 12, 20))],
        "head": [("head", (5,))],
    }


def test_a_segmentation_gets_the_map_whose_mean_classifies_the_image() -> None:
    data = DataConfig(name="tissue", height_px=13, width_px=22)
    dense = layers_of(SMALL, replace(data, task="segmentation"))
    shapes = [layers_of(SMALL, data), dense]
    images = torch.randn(2, 3, 13, 22, generator=torch.Generator().manual_seed(0))
    mean, each = (run_all(build_layers(layers, 0, len(layers), 0), images)[0] for layers in shapes)
    assert each.shape == (2, 2, 13, 22)
    torch.testing.assert_close(each.mean(dim=(2, 3)), mean)


def test_a_network_without_a_map_is_refused() -> None:
    data = DataConfig(name="synthetic", task="segmentation")
    with pytest.raises(
        ConfigError,
        match=r"data\.task=segmentation: model resnet gives one score .* set model=unet",
    ):
        resolve(RunSpec(data=data))
    assert resolve(RunSpec(data=data, model=SMALL)).model.name == "unet"


def test_a_skip_is_the_very_tensor_until_it_is_joined() -> None:
    layers = layers_of(SMALL, DataConfig())
    values: tuple[Tensor, ...] = (torch.randn(1, 3, 16, 16),)
    skips: list[Tensor] = []
    for layer, module in zip(layers, build_layers(layers, 0, len(layers), 0), strict=True):
        given = values
        values = as_tuple(module(*values))
        if layer.kind == "pool":
            skips.append(given[0])
        if layer.name.endswith("widen"):
            joined = skips.pop()
            assert torch.equal(values[0][:, : joined.shape[1]], joined)
        assert len(values) == 1 + len(skips)
        assert all(mine is skip for mine, skip in zip(values[1:], skips, strict=True))
    assert not skips


@pytest.mark.parametrize(("height", "width"), [(8, 8), (37, 21), (64, 9)])
def test_any_size_of_at_least_one_stride(height: int, width: int) -> None:
    data = DataConfig(height_px=height, width_px=width, num_classes=4)
    check_image(SMALL, data, micro_batch_size=2)
    layers = layers_of(SMALL, data)
    shapes = dict(
        zip(
            (layer.name for layer in layers),
            boundary_shapes(layers, (2, 3, height, width)),
            strict=True,
        )
    )
    assert shapes["bottom.conv2"][0].shape[2:] == (-(-height // 8), -(-width // 8))
    assert shapes["up1.conv2"][0].shape[2:] == (height, width)
    with pytest.raises(ConfigError, match="at least 8 px"):
        check_image(SMALL, DataConfig(height_px=7, width_px=64))


@pytest.mark.parametrize("depth", [1, 13])
def test_a_depth_that_no_network_has_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of(ModelConfig(name="unet", depth=depth, width=4, norm="none"), DataConfig())
    assert caught.value.key == "model.depth"


def test_the_values_keep_their_scale_without_a_norm() -> None:
    model = ModelConfig(name="unet", depth=5, width=16, norm="none")
    layers = layers_of(model, DataConfig())
    values: tuple[Tensor, ...] = (
        torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        for module in build_layers(layers, 0, len(layers), 0):
            values = as_tuple(module(*values))
            assert 0.1 < values[0].std() < 10 or values[0].dim() == 2


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize(("parts", "is_split"), [(4, False), (4, True), (21, False)])
def test_a_cut_changes_no_bit(norm: str, parts: int, is_split: bool) -> None:
    data = DataConfig(height_px=19, width_px=16, num_classes=3)
    model = ModelConfig(name="unet", depth=4, width=4, norm=norm)
    assert_cut_equals_whole(model, data, parts=parts, is_split=is_split)

"""The simplified U-Net: torchgpipe's children and parameter counts, its skips, and cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import check_image, layers_of
from gems.models.build import build_layer
from tests.helpers.zoo import run_all

SMALL = ModelConfig(name="unet_simplified", depth=2, width=4, convs=2, norm="none", dropout=0.0)
DENSE = DataConfig(task="segmentation", height_px=32, width_px=32, num_classes=2)


@pytest.mark.parametrize(
    ("convs", "width", "children", "parameters"),
    [(5, 64, 241, None), (6, 72, 285, 362.2e6), (11, 128, 505, 2.21e9), (24, 160, 1077, 7.80e9)],
)
def test_it_has_the_children_and_parameters_that_torchgpipe_reports(
    convs: int, width: int, children: int, parameters: float | None
) -> None:
    layers = layers_of(replace(SMALL, depth=5, convs=convs, width=width), DENSE)
    assert len(layers) == children
    if parameters is not None:
        options = [dict(layer.options) for layer in layers if layer.kind == "conv"]
        total = sum(9 * each["in_channels"] * each["out_channels"] for each in options)
        assert total == pytest.approx(parameters, rel=2e-3)


def test_sides_that_are_odd_are_padded_to_their_skip() -> None:
    layers = layers_of(SMALL, DENSE)
    modules = [build_layer(layer, index, 0) for index, layer in enumerate(layers)]
    (out,) = run_all(modules, torch.randn(2, 3, 13, 10))
    assert out.shape == (2, 2, 13, 10)
    names = [layer.name for layer in layers]
    assert names[:10:8] == ["down1.conv1", "down1.skip"]
    joined = modules[names.index("up2.join")]
    assert joined.output_names == ("main", "skip1")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"depth": 13}, "model.depth"),
        ({"width": 5}, "model.width"),
        ({"norm": "batch"}, "model.norm"),
    ],
)
def test_other_networks_are_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        layers_of(replace(SMALL, **changes), DENSE)
    assert refused.value.key == key


def test_an_image_has_a_stride() -> None:
    with pytest.raises(ConfigError):
        check_image(SMALL, replace(DENSE, height_px=3))

"""The registry of families, the check of image sizes, and that none of it needs torch."""

from __future__ import annotations

import pytest

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import MODELS, ModelFamily, check_image, layers_of, title_of
from tests.helpers.processes import python


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of(ModelConfig(name="resnest"), DataConfig())
    assert caught.value.key == "model.name"
    assert "nearest: resnet" in str(caught.value)


def test_every_family_gives_layers_of_the_small_networks_without_torch() -> None:
    program = (
        "import sys; from gems.models import *; from gems.config.schema import *; names ="
        " ['alexnet', 'googlenet', 'inception_v3', 'overfeat']; layers ="
        " [layers_of(ModelConfig(name=name), DataConfig()) for name in names]; layers +="
        " [layers_of(ModelConfig(name='vgg', depth=416), DataConfig())]; layers +="
        " [layers_of(ModelConfig(name='resnet_imagenet', depth=152), DataConfig())]; layers +="
        " [layers_of(ModelConfig(name='convnext', depth=36, norm='layer'), DataConfig())];"
        " print(*map(len, layers), 'torch' in sys.modules)"
    )
    done = python("-c", program, check=True)
    assert done.stdout.split() == ["8", "13", "17", "8", "416", "52", "41", "False"]


def test_batch_norm_over_a_single_value_is_refused() -> None:
    smallest = DataConfig(height_px=4, width_px=4)
    with pytest.raises(ConfigError, match="batch norm"):
        check_image(ModelConfig(), smallest, micro_batch_size=1)
    check_image(ModelConfig(), smallest, micro_batch_size=2)
    check_image(ModelConfig(norm="group"), smallest, micro_batch_size=1)
    check_image(ModelConfig(), DataConfig(height_px=4, width_px=5), micro_batch_size=1)


def test_a_taken_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MODELS.entries, "toy", raising=False)
    family = ModelFamily(layers=lambda model, data: (), stride_px=lambda model: 1)
    MODELS.register("toy", family)
    MODELS.register("toy", family)
    with pytest.raises(ValueError, match="registered already"):
        MODELS.register("resnet", family)


@pytest.mark.parametrize(
    ("model", "title"),
    [
        (ModelConfig(depth=110, version=2), "resnet110-v2"),
        (ModelConfig(name="vgg", depth=416), "vgg416"),
        (ModelConfig(name="resnet_imagenet", depth=50), "resnet_imagenet50-v1"),
        (ModelConfig(name="googlenet"), "googlenet"),
    ],
)
def test_a_title_names_what_the_family_varies_in(model: ModelConfig, title: str) -> None:
    assert title_of(model) == title

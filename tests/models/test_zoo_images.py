"""Image classifiers at any resolution: sizes, names, what is refused, scale of the output, dropout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import check_image, layers_of, stride_of
from gems.models.build import boundary_shapes, build_layer, build_layers
from tests.helpers.zoo import PRESETS, SMALL, num_parameters, published, run_all

CHAINS = (
    "alexnet",
    "overfeat",
    "vgg",
    "googlenet",
    "inception_v3",
    "resnet_imagenet",
    "resnet",
    "convnext",
)
CLASSIFIERS = [
    path.stem for path in sorted(PRESETS.glob("*.yaml")) if published(path.stem).name in CHAINS
]


def logits_of(model: ModelConfig, data: DataConfig) -> torch.Tensor:
    layers = layers_of(model, data)
    modules = [module.eval() for module in build_layers(layers, 0, len(layers), seed=0)]
    with torch.no_grad():
        return run_all(modules, torch.randn(2, data.channels, data.height_px, data.width_px))[0]


@pytest.mark.parametrize("preset", CLASSIFIERS)
def test_a_layer_is_named_once_and_the_last_is_the_head(preset: str) -> None:
    layers = layers_of(published(preset), DataConfig(num_classes=10))
    assert len({layer.name for layer in layers}) == len(layers)
    assert layers[-1].name == layers[-1].kind == "head"
    assert len({*layers}) > 1  # hashable


def test_the_layers_of_one_network_of_each_kind() -> None:
    def names(preset: str, **changes: object) -> str:
        return " ".join(
            layer.name for layer in layers_of(published(preset, **changes), DataConfig())
        )

    assert names("alexnet") == names("overfeat") == "conv1 conv2 conv3 conv4 conv5 fc1 fc2 head"
    assert (
        names("vgg16", depth=13)
        == "conv1_1 conv1_2 conv2_1 conv2_2 conv3_1 conv3_2 conv4_1 conv4_2 conv5_1 conv5_2 fc1 fc2"
        " head"
    )
    assert names("googlenet").split()[:5] == [
        "conv1",
        "conv2",
        "conv3",
        "inception3a",
        "inception3b",
    ]
    assert names("inception_v3", auxiliary=True).split()[-6:] == [
        "mixed6e",
        "auxiliary",
        "mixed7a",
        "mixed7b",
        "mixed7c",
        "head",
    ]
    assert len(names("vgg416").split()) == 416
    assert len(names("resnet152").split()) == 52
    first = "stem stage1.block1 stage1.block2 stage1.block3 stage2.downsample stage2.block1 "
    assert names("convnext_tiny").startswith(first)
    assert len(names("convnext_base").split()) == 41


@pytest.mark.parametrize(
    ("preset", "side_px", "last"),
    [
        ("alexnet", 224, (256, 6, 6)),
        ("overfeat", 231, (1024, 6, 6)),
        ("vgg16", 224, (512, 7, 7)),
        ("vgg416", 224, (512, 7, 7)),
        ("googlenet", 224, (1024, 7, 7)),
        ("inception_v3", 299, (2048, 8, 8)),
        ("resnet50", 224, (2048, 7, 7)),
        ("resnet18", 224, (512, 7, 7)),
        ("convnext_tiny", 224, (768, 7, 7)),
        ("convnext_large", 224, (1536, 7, 7)),
    ],
)
def test_the_last_map_at_the_published_size_is_the_published_one(
    preset: str, side_px: int, last: tuple[int, ...]
) -> None:
    shapes = boundary_shapes(layers_of(published(preset), DataConfig()), (1, 3, side_px, side_px))
    assert [spec.shape[1:] for specs in shapes for spec in specs if len(spec.shape) == 4][
        -1
    ] == last


def test_the_maps_between_the_groups_of_inception_v3() -> None:
    """Szegedy et al. 2015, table 1: 35x35x288, 17x17x768 and 8x8x1280 go into the groups of blocks."""
    layers = layers_of(published("inception_v3"), DataConfig())
    shapes = boundary_shapes(layers, (1, 3, 299, 299))
    found = {layer.name: specs[0].shape[1:] for layer, specs in zip(layers, shapes, strict=True)}
    assert (found["mixed5d"], found["mixed6e"]) == ((288, 35, 35), (768, 17, 17))
    assert found["mixed7a"] == (1280, 8, 8)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("higher", "wider"), [(0, 14), (58, 3)])
def test_any_size_from_the_smallest_on_gives_finite_logits(
    name: str, higher: int, wider: int
) -> None:
    model, least_px = SMALL[name]
    data = DataConfig(height_px=least_px + higher, width_px=least_px + wider, num_classes=6)
    check_image(model, data)
    logits = logits_of(model, data)
    assert logits.shape == (2, 6)
    assert logits.isfinite().all()
    specs = boundary_shapes(layers_of(model, data), (2, 3, data.height_px, data.width_px))
    assert specs[-1][0].shape == logits.shape


@pytest.mark.parametrize("name", SMALL)
def test_a_smaller_image_is_refused(name: str) -> None:
    model, least_px = SMALL[name]
    for key, height_px, width_px in (
        ("data.height_px", least_px - 1, least_px),
        ("data.width_px", least_px, least_px - 1),
    ):
        with pytest.raises(
            ConfigError, match=f"at least {least_px} px; set {key}={least_px}"
        ) as caught:
            check_image(model, DataConfig(height_px=height_px, width_px=width_px))
        assert caught.value.key == key


@pytest.mark.parametrize("name", ["alexnet", "overfeat", "vgg16", "inception_v3"])
def test_what_is_refused_leaves_no_map(name: str) -> None:
    model, least_px = SMALL[name]
    layers = layers_of(model, DataConfig())
    with pytest.raises(RuntimeError, match=r"too small|greater than actual"):
        boundary_shapes(layers, (1, 3, least_px - 1, least_px - 1))


@pytest.mark.parametrize(
    ("name", "height_px", "width_px"),
    [
        ("inception_v3", 75, 75),
        ("inception_v3_auxiliary", 299, 299),
        ("inception_v3_auxiliary", 299, 107),
        ("googlenet_batch", 32, 32),
        ("resnet18", 32, 32),
    ],
)
def test_batch_norm_over_a_single_value_is_refused_and_would_indeed_break(
    name: str, height_px: int, width_px: int
) -> None:
    model, _ = SMALL[name]
    data = DataConfig(height_px=height_px, width_px=width_px)
    with pytest.raises(ConfigError, match="one value a channel") as caught:
        check_image(model, data, micro_batch_size=1)
    layers = layers_of(model, data)
    modules = build_layers(layers, 0, len(layers), seed=0)
    with pytest.raises(ValueError, match="more than 1 value per channel"), torch.no_grad():
        run_all(modules, torch.randn(1, 3, height_px, width_px))
    advised = int(caught.value.advice.partition("data.height_px=")[2].partition(" ")[0])
    check_image(model, DataConfig(height_px=advised, width_px=width_px), micro_batch_size=1)


@pytest.mark.parametrize("name", ["alexnet", "overfeat", "vgg11_batch", "inception_v3_auxiliary"])
def test_where_a_norm_sees_more_values_a_single_image_is_enough(name: str) -> None:
    model, least_px = SMALL[name]
    model = replace(model, norm="batch")
    side_px = 347 if name == "inception_v3_auxiliary" else least_px
    data = DataConfig(height_px=side_px, width_px=side_px)
    check_image(model, data, micro_batch_size=1)
    layers = layers_of(model, data)
    modules = build_layers(layers, 0, len(layers), seed=0)
    assert run_all(modules, torch.randn(1, 3, side_px, side_px))[0].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"name": "vgg", "depth": 20}, "model.depth", ["16+5n", "nearest: 19, 21"]),
        ({"name": "vgg", "depth": 117}, "model.depth", ["nearest: 116, 121"]),
        ({"name": "vgg", "depth": 2}, "model.depth", ["nearest: 11, 13"]),
        (
            {"name": "resnet_imagenet", "depth": 20},
            "model.depth",
            ["18, 34, 50, 101, 152", "nearest: 18, 34"],
        ),
        (
            {"name": "resnet_imagenet", "depth": 50, "norm": "normalizer_free"},
            "model.norm",
            ["set model.version=2"],
        ),
        (
            {
                "name": "resnet",
                "depth": 20,
                "version": 2,
                "norm": "normalizer_free",
                "shortcut": "identity",
            },
            "model.shortcut",
            ["model.shortcut=projection"],
        ),
        ({"name": "vgg", "depth": 16, "norm": "normalizer_free"}, "model.norm", ["layer, none"]),
        (
            {"name": "resnet_imagenet", "depth": 50, "block": "basic"},
            "model.block",
            ["auto, bottleneck"],
        ),
        ({"name": "resnet_imagenet", "depth": 50, "shortcut": "x"}, "model.shortcut", ["identity"]),
        ({"name": "overfeat", "dropout": 1.0}, "model.dropout", ["below 1"]),
        ({"name": "inception_v3", "dropout": -0.1}, "model.dropout", ["0 or more"]),
        ({"name": "googlenet", "auxiliary": True}, "model.auxiliary", ["model=inception_v3"]),
        (
            {"name": "resnet", "stochastic_depth": 0.1},
            "model.stochastic_depth",
            ["model=convnext_tiny"],
        ),
        (
            {"name": "convnext", "depth": 18, "norm": "layer", "stochastic_depth": 1.0},
            "model.stochastic_depth",
            ["below 1"],
        ),
        (
            {"name": "convnext", "depth": 20, "norm": "layer"},
            "model.depth",
            ["18 (tiny)", "nearest: 18, 36"],
        ),
        ({"name": "convnext", "depth": 18}, "model.norm", ["allowed: layer"]),
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


@pytest.mark.parametrize("depth", [16, 116, 416])
def test_vgg_without_norm_stays_finite_at_64_px(depth: int) -> None:
    """Zero padding fades the signal of a deep one, and so only what is finite and above nothing is asked of it."""
    layers = layers_of(published("vgg16", depth=depth, width=16), DataConfig())
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for index, layer in enumerate(layers[:-3]):
            x = build_layer(layer, index, seed=0)(x)
    assert x.isfinite().all()
    assert 1e-20 < x.std().item() < 100


@pytest.mark.parametrize(
    ("name", "num_dropouts"),
    [
        ("alexnet", 2),
        ("overfeat", 2),
        ("vgg16", 2),
        ("googlenet", 1),
        ("inception_v3", 1),
        ("resnet18", 1),
        ("convnext_tiny", 1),
    ],
)
def test_dropout_is_an_option_of_the_classifier(name: str, num_dropouts: int) -> None:
    model, _ = SMALL[name]
    for rate, expected in ((0.0, []), (0.25, [0.25] * num_dropouts)):
        layers = layers_of(replace(model, dropout=rate), DataConfig())
        modules = build_layers(layers, 0, len(layers), seed=0, device="meta")
        parts = [part for module in modules for part in module.modules()]
        assert [part.p for part in parts if isinstance(part, torch.nn.Dropout)] == expected


@pytest.mark.parametrize("name", ["alexnet", "googlenet"])
def test_the_parameters_do_not_depend_on_the_size_of_the_image(name: str) -> None:
    model, least_px = SMALL[name]
    counts = {
        num_parameters(model, DataConfig(height_px=side, width_px=side))
        for side in (least_px, 1024)
    }
    assert len(counts) == 1


@pytest.mark.parametrize("name", SMALL)
def test_the_stride_is_the_real_down_sampling(name: str) -> None:
    model, _ = SMALL[name]
    stride_px = stride_of(model)
    sides = []
    for side_px in (640, 640 + 4 * stride_px):
        shapes = boundary_shapes(layers_of(model, DataConfig()), (1, 3, side_px, side_px))
        sides.append(
            [spec.shape[2] for specs in shapes for spec in specs if len(spec.shape) == 4][-1]
        )
    assert sides[1] - sides[0] == 4
    assert sides[0] <= math.ceil(640 / stride_px)

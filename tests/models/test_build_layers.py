"""Modules from layers: the same weights under any cut, shapes on the meta device, logits from the head."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, ModelConfig
from gems.models import MODELS, Layer, ModelFamily, layers_of
from gems.models.build import TensorSpec, boundary_shapes, build_layer, build_layers

VARIANTS = [
    ModelConfig(depth=8),
    ModelConfig(depth=8, shortcut="projection"),
    ModelConfig(depth=11, block="bottleneck"),
    ModelConfig(depth=11, block="bottleneck", shortcut="identity"),
    ModelConfig(depth=8, version=2),
    ModelConfig(depth=11, version=2),
    ModelConfig(depth=11, version=2, shortcut="identity"),
    ModelConfig(depth=8, norm="group", width=12),
    ModelConfig(depth=8, norm="frozen_batch"),
    ModelConfig(depth=8, norm="layer"),
    ModelConfig(depth=11, version=2, norm="none"),
]


def variant_name(model: ModelConfig) -> str:
    return f"v{model.version}-{model.depth}-{model.block}-{model.shortcut}-{model.norm}"


class Splits(nn.Module):
    """Hands on two tensors of different shapes."""

    output_names = ("wide", "mean")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.repeat(1, 2, 1, 1), x.mean(dim=(2, 3))


class Swaps(nn.Module):
    """Takes two tensors and hands them on in the other order, without naming them."""

    def forward(self, wide: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        return mean, wide


class Joins(nn.Module):
    """Takes two tensors and gives logits."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * channels, num_classes)

    def forward(self, mean: Tensor, wide: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.cat([wide.mean(dim=(2, 3)), mean], dim=1))
        return out


class Breaks(nn.Module):
    """Cannot take what the layer before gives."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 7919)


def toy_layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    last = (("channels", data.channels), ("num_classes", data.num_classes))
    return (
        Layer("split", "toy", f"{__name__}:Splits", ()),
        Layer("swap", "toy", f"{__name__}:Swaps", ()),
        Layer("join", "head", f"{__name__}:Joins", last),
    )


def state_of(modules: list[nn.Module]) -> list[Tensor]:
    return [value for module in modules for value in module.state_dict().values()]


@pytest.mark.parametrize("model", VARIANTS, ids=variant_name)
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 37, 53), (5, 4, 9), (3, 16, 16)])
def test_boundary_shapes_are_those_of_a_real_forward(
    model: ModelConfig, channels: int, height: int, width: int
) -> None:
    data = DataConfig(height_px=height, width_px=width, channels=channels, num_classes=6)
    layers = layers_of(model, data)
    specs = boundary_shapes(layers, (2, channels, height, width), torch.float64)
    tensors: tuple[Tensor, ...] = (torch.randn(2, channels, height, width, dtype=torch.float64),)
    for layer, spec, module in zip(
        layers,
        specs,
        build_layers(layers, 0, len(layers), seed=3, dtype=torch.float64),
        strict=True,
    ):
        tensors = as_tuple(module(*tensors))
        assert spec == tuple(TensorSpec(layer.name, tuple(t.shape), t.dtype) for t in tensors)
    assert tensors[0].shape == (2, 6)


def test_num_bytes_counts_the_tensor_in_its_dtype() -> None:
    layers = layers_of(ModelConfig(depth=8), DataConfig())
    for dtype in (torch.float16, torch.float32, torch.float64):
        spec = boundary_shapes(layers, (2, 3, 10, 6), dtype)[0][0]
        assert spec.dtype is dtype
        assert spec.num_bytes == torch.empty(2, 16, 10, 6, dtype=dtype).nbytes


def test_boundary_shapes_of_a_thousand_layers_at_a_resolution_no_memory_holds() -> None:
    layers = layers_of(ModelConfig(depth=1001, version=2), DataConfig())
    specs = boundary_shapes(layers, (1, 3, 100_000, 100_000))
    assert len(specs) == 335
    assert specs[-2][0].shape == (1, 256, 25_000, 25_000)


@pytest.mark.parametrize("cut", [(0, 1, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_weights_do_not_depend_on_the_cut(cut: tuple[int, ...]) -> None:
    layers = layers_of(ModelConfig(depth=8), DataConfig())
    whole = state_of(build_layers(layers, 0, 5, seed=7))
    # The last stage is built first, as a rank of the other direction would.
    stages = [
        build_layers(layers, first, last, seed=7) for first, last in reversed([*pairwise(cut)])
    ]
    pieces = [value for stage in reversed(stages) for value in state_of(stage)]
    assert len(whole) == len(pieces)
    assert all(torch.equal(left, right) for left, right in zip(whole, pieces, strict=True))


def test_weights_depend_on_seed_and_index_and_are_rounded_only_by_dtype() -> None:
    layers = layers_of(ModelConfig(depth=14), DataConfig())
    assert layers[1].options == layers[2].options
    first, again = (build_layer(layers[1], 1, 0).branch[0].weight for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, build_layer(layers[2], 2, 0).branch[0].weight)
    assert not torch.equal(first, build_layer(layers[1], 1, 1).branch[0].weight)
    double = build_layer(layers[1], 1, 0, torch.float64).branch[0].weight
    assert torch.equal(double, first.double())


def test_building_leaves_the_global_random_state() -> None:
    layers = layers_of(ModelConfig(depth=8), DataConfig())
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    build_layers(layers, 0, len(layers), seed=5)
    boundary_shapes(layers, (1, 3, 8, 8))
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(12)
    other = state_of(build_layers(layers, 0, 1, seed=5))
    assert torch.equal(other[0], state_of(build_layers(layers, 0, 1, seed=5))[0])


def test_convolutions_are_drawn_as_he_et_al_say() -> None:
    layers = layers_of(ModelConfig(depth=20), DataConfig())
    weight = build_layer(layers[9], 9, 0).branch[3].weight
    assert weight.shape == (64, 64, 3, 3)
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert abs(weight.mean().item()) < 0.001


def test_a_deep_network_without_norm_keeps_its_scale() -> None:
    layers = layers_of(ModelConfig(depth=110, norm="none"), DataConfig())
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for module in build_layers(layers, 0, len(layers), seed=0):
            x = module(x)
    assert x.abs().max().item() < 100


@pytest.mark.parametrize("model", VARIANTS, ids=variant_name)
def test_no_layer_works_in_place_and_every_parameter_gets_a_gradient(model: ModelConfig) -> None:
    layers = layers_of(model, DataConfig(num_classes=3))
    x = torch.randn(2, 3, 8, 8)
    for module in build_layers(layers, 0, len(layers), seed=0):
        leaf = x.detach().requires_grad_()
        version = leaf._version
        out = module(leaf)
        out.square().mean().backward()
        assert leaf._version == version
        assert leaf.grad is not None
        assert all(parameter.grad is not None for parameter in module.parameters())
        x = out


@pytest.mark.parametrize("version", [1, 2])
def test_the_head_gives_logits_and_no_softmax(version: int) -> None:
    """A softmax in the head, as in MPI4DL's ResNets, keeps the loss of 10 classes above 1.46 for ever."""
    layers = layers_of(ModelConfig(depth=20, version=version), DataConfig(num_classes=10))
    head = build_layer(layers[-1], len(layers) - 1, seed=0).eval()
    channels = head.linear.in_features
    x = torch.randn(4, channels, 3, 5).abs()
    with torch.no_grad():
        head.linear.bias.zero_()
        logits = head(x)
        head.linear.weight.mul_(1000)
        assert torch.allclose(head(x), 1000 * logits, rtol=1e-4)
        confident = head(x)
    loss = nn.functional.cross_entropy(confident, confident.argmax(dim=1))
    assert loss.item() < 0.1
    assert confident.abs().max().item() > 1


def test_group_norm_takes_groups_that_divide_the_channels() -> None:
    layers = layers_of(ModelConfig(depth=8, norm="group", width=12), DataConfig())
    modules = build_layers(layers, 0, len(layers), seed=0)
    norms = [
        part for module in modules for part in module.modules() if isinstance(part, nn.GroupNorm)
    ]
    assert {(norm.num_groups, norm.num_channels) for norm in norms} == {(4, 12), (8, 24), (8, 48)}


def test_a_family_may_hand_on_several_named_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        MODELS.entries, "toy", ModelFamily(layers=toy_layers, stride_px=lambda model: 1)
    )
    data = DataConfig(channels=5, num_classes=4)
    layers = layers_of(ModelConfig(name="toy"), data)
    split, swap, join = boundary_shapes(layers, (2, 5, 6, 7))
    wide = (2, 10, 6, 7)
    mean = (2, 5)
    assert split == (
        TensorSpec("split.wide", wide, torch.float32),
        TensorSpec("split.mean", mean, torch.float32),
    )
    assert swap == (
        TensorSpec("swap.0", mean, torch.float32),
        TensorSpec("swap.1", wide, torch.float32),
    )
    assert join == (TensorSpec("join", (2, 4), torch.float32),)
    tensors: tuple[Tensor, ...] = (torch.randn(2, 5, 6, 7),)
    for module, specs in zip(build_layers(layers, 0, 3, seed=0), (split, swap, join), strict=True):
        tensors = as_tuple(module(*tensors))
        assert tuple(tuple(tensor.shape) for tensor in tensors) == tuple(
            spec.shape for spec in specs
        )


def test_a_layer_that_cannot_take_its_input_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        boundary_shapes([Layer("odd", "toy", f"{__name__}:Breaks", ())], (2, 3, 4, 4))
    assert "layer odd took (2, 3, 4, 4)" in "\n".join(caught.value.__notes__)

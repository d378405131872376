"""AmoebaNet-D: its parameters by hand, the published counts, two tensors between cells, and cuts that change no bit."""

from __future__ import annotations

import pytest
import torch

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import check_image, layers_of
from gems.models.build import boundary_shapes, build_layer, build_layers
from gems.models.families.amoebanet import NORMAL, REDUCTION
from tests.helpers.cutting import assert_cut_equals_whole

SMALL = ModelConfig(name="amoebanet", depth=3, width=8)


def conv(before: int, after: int, taps: int = 1) -> int:
    """Parameters of a convolution without bias and of its batch norm."""
    return before * after * taps + 2 * after


def operations(pairs: tuple, channels: int) -> int:
    inner = channels // 4
    through = conv(channels, inner) + conv(inner, channels)
    of = {
        "none": 0,
        "max2x2": 0,
        "max3x3": 0,
        "average3x3": 0,
        "conv1x1": conv(channels, channels),
        "conv3x3": through + conv(inner, inner, 9),
        "conv1x7_7x1": through + 2 * conv(inner, inner, 7),
    }
    return sum(of[operation] for pair in pairs for operation, _ in pair)


def by_hand(depth: int, filters: int, num_classes: int, channels: int = 3) -> int:
    """The cells' channels from the paper's layout.

    (F/4 stem), F/2, F | F ... | 2F, 2F ... | 4F, 4F ...
    """
    repeat = depth // 3
    reduction = (REDUCTION.pairs, 3)
    normal = (NORMAL.pairs, 4)
    cells = [(reduction, filters // 2), (reduction, filters), *[(normal, filters)] * repeat]
    cells += [(reduction, 2 * filters), *[(normal, 2 * filters)] * repeat]
    cells += [(reduction, 4 * filters), *[(normal, 4 * filters)] * repeat]
    total = conv(channels, filters // 4, 9)
    before = last = filters // 4
    was_reduction = False
    for (pairs, num_joined), width in cells:
        total += conv(last, width) + operations(pairs, width)
        if was_reduction or before != width:
            total += conv(before, width)
        before = last
        last = num_joined * width
        was_reduction = pairs is REDUCTION.pairs
    return total + (last + 1) * num_classes


def count(model: ModelConfig, num_classes: int) -> int:
    layers = layers_of(model, DataConfig(num_classes=num_classes))
    modules = build_layers(layers, 0, len(layers), 0, device="meta")
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize(
    ("depth", "filters", "expected"),
    [(18, 208, 81_505_540), (18, 256, 122_470_120), (36, 544, 1_055_832_376)],
)
def test_parameters_are_those_of_the_definition(depth: int, filters: int, expected: int) -> None:
    """The first is the 82 M that Huang et al. 2019 give for AmoebaNet-D (18, 208)."""
    found = count(ModelConfig(name="amoebanet", depth=depth, width=filters), 1000)
    assert found == by_hand(depth, filters, 1000) == expected


def test_a_deeper_network_adds_normal_cells_alone() -> None:
    assert count(SMALL, 5) == by_hand(3, 8, 5)
    assert count(ModelConfig(name="amoebanet", depth=9, width=16), 7) == by_hand(9, 16, 7)


def test_every_state_is_used_and_every_pair_reads_earlier_ones() -> None:
    for pairs, joined, _ in (NORMAL, REDUCTION):
        read = {state for pair in pairs for _, state in pair}
        assert len(pairs) == 5 and read | set(joined) == set(range(7))
        assert all(state < 2 + index for index, pair in enumerate(pairs) for _, state in pair)


def test_names_and_tensors_between_the_layers() -> None:
    layers = layers_of(SMALL, DataConfig(num_classes=5))
    assert [layer.name for layer in layers] == [
        "stem.conv",
        "stem.reduction1",
        "stem.reduction2",
        "stage1.cell1",
        "reduction1",
        "stage2.cell1",
        "reduction2",
        "stage3.cell1",
        "head",
    ]
    stem, first, second, cell, *_, last, head = boundary_shapes(layers, (2, 3, 64, 96))
    assert [(spec.name, spec.shape) for spec in stem] == [("stem.conv", (2, 2, 32, 48))]
    assert [(spec.name, spec.shape) for spec in first] == [
        ("stem.reduction1.cell", (2, 12, 16, 24)),
        ("stem.reduction1.before", (2, 2, 32, 48)),
    ]
    assert [spec.shape for spec in second] == [(2, 24, 8, 12), (2, 12, 16, 24)]
    assert [spec.shape for spec in cell] == [(2, 32, 8, 12), (2, 24, 8, 12)]
    assert [(spec.name, spec.shape) for spec in last] == [("stage3.cell1", (2, 128, 2, 3))]
    assert [spec.shape for spec in head] == [(2, 5)]


def test_what_a_cell_hands_on_of_the_last_one_is_the_very_tensor() -> None:
    layers = layers_of(SMALL, DataConfig())
    cell = build_layer(layers[3], 3, 0)
    last = torch.randn(2, 24, 4, 4)
    before = torch.randn(2, 12, 8, 8)
    _, carried = cell(last, before)
    assert carried is last


@pytest.mark.parametrize(("height", "width"), [(33, 75), (64, 64), (97, 32)])
def test_sides_need_be_multiples_of_nothing(height: int, width: int) -> None:
    data = DataConfig(height_px=height, width_px=width, num_classes=4)
    check_image(SMALL, data, micro_batch_size=2)
    *_, last, head = boundary_shapes(layers_of(SMALL, data), (2, 3, height, width))
    assert last[0].shape[2:] == (-(-height // 32), -(-width // 32))
    assert head[0].shape == (2, 4)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"depth": 4}, "model.depth"),
        ({"depth": 0}, "model.depth"),
        ({"width": 12}, "model.width"),
        ({"width": 4}, "model.width"),
        ({"norm": "none"}, "model.norm"),
        ({"norm": "local"}, "model.norm"),
    ],
)
def test_networks_that_do_not_exist_are_refused(changes: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of(
            ModelConfig(**{"name": "amoebanet", "depth": 3, "width": 8, **changes}), DataConfig()
        )
    assert caught.value.key == key


def test_a_small_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32 px"):
        check_image(SMALL, DataConfig(height_px=31, width_px=64))


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("parts", [4, 9])
def test_a_cut_changes_no_bit(parts: int, is_split: bool) -> None:
    data = DataConfig(height_px=40, width_px=33, num_classes=3)
    assert_cut_equals_whole(SMALL, data, parts=parts, is_split=is_split)

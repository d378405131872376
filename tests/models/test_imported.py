"""A user's own network as layers: the same values as the whole, whatever the cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gems.autograd.outputs import as_tuple, tensors_in
from gems.config.schema import DataConfig, ModelConfig
from gems.engine.stages.whole import WholeStage
from gems.models import layers_of
from gems.models.build import boundary_shapes, build_layer, build_layers
from gems.models.imported.user_code import construct, other_generators
from tests.helpers.owned import DATA, NETS, UNET, own
from tests.helpers.zoo import run_all

SEED = 3

# target -> names of its layers
CUTS = {
    UNET: ["down.0", "down.1", "bottom", "up.0", "up.1", "logits"],
    "tests.helpers.own_unet.make_unet": ["down.0", "down.1", "bottom", "up.0", "up.1", "logits"],
    f"{NETS}.chain": ["0", "1.0", "1.1", "1.2", "2", "3", "4"],
    f"{NETS}.cells": ["0", "1", "2", "3"],
    f"{NETS}.Wrapped": [
        "backbone.stem",
        *(f"backbone.stages.{i}.{j}" for i in (0, 1) for j in (0, 1)),
        "mix",
        "head",
    ],
    f"{NETS}.Tied": ["shared", "head"],
    f"{NETS}.Carried": ["first", "second", "head"],
    f"{NETS}.Early": ["first", "second", "watched"],
    f"{NETS}.Written": ["first", "second", "third"],
    f"{NETS}.Aliased": ["first-second", "third", "head"],
    f"{NETS}.Named": ["first-third"],
    f"{NETS}.ReadsItself": ["conv"],
}
NETWORKS = list(CUTS)


def whole_of(model: ModelConfig) -> nn.Module:
    """The user's network as it is, with the values that its layers have."""
    seed = int(np.random.SeedSequence((SEED, 0)).generate_state(1, np.uint64)[0])
    with torch.random.fork_rng(devices=[]), other_generators(seed):
        torch.manual_seed(seed)
        return construct(str(model.target), model.kwargs, model.path).double()


def parts_of(model: ModelConfig) -> list[nn.Module]:
    layers = layers_of(model, DATA)
    return build_layers(layers, 0, len(layers), SEED, torch.float64)


def batch(num_images: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_images, DATA.channels, DATA.height_px, DATA.width_px)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.arange(num_images) % 2,
    )


def gradients(modules: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in modules.named_parameters() if p.grad is not None}


def union(dictionaries: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for each in dictionaries for name, value in each.items()}


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("target", NETWORKS)
class TestLayers:
    def test_begin_at_the_blocks(self, target: str) -> None:
        assert [layer.name for layer in layers_of(own(target), DATA)] == CUTS[target]

    def test_in_a_row_are_the_network(self, target: str) -> None:
        """Logit, gradients, running statistics, and the logits of evaluation after them."""
        whole = whole_of(own(target))
        parts = parts_of(own(target))
        check_equal(
            dict(whole.named_parameters()) | union([part.state_dict() for part in parts]),
            whole.state_dict(),
        )
        images, labels = batch()
        cross_entropy(whole(images.clone()), labels).backward()
        cross_entropy(run_all(parts, images)[0], labels).backward()
        check_equal(union([gradients(part) for part in parts]), gradients(whole))
        logits = run_all([part.eval() for part in parts], images)[0]
        assert torch.equal(logits, whole.eval()(images.clone()))

    def test_hand_on_what_the_shapes_say(self, target: str) -> None:
        layers = layers_of(own(target), DATA)
        values: tuple[Tensor, ...] = (batch(3)[0],)
        shapes = boundary_shapes(layers, tuple(values[0].shape), torch.float64)
        for part, specs in zip(parts_of(own(target)), shapes, strict=True):
            values = as_tuple(part.eval()(*values))
            assert [(spec.shape, spec.dtype) for spec in specs] == [
                (v.shape, v.dtype) for v in values
            ]

    @pytest.mark.parametrize("is_split", [False, True])
    def test_are_cut_anywhere(self, target: str, is_split: bool) -> None:
        """In stages of one layer, with whole and split backward.

        What a stage takes in is a leaf of its graph.
        """
        whole = whole_of(own(target))
        images, labels = batch()
        cross_entropy(whole(images.clone()), labels).backward()
        parts = parts_of(own(target))
        stages = [
            WholeStage(nn.ModuleList([part]), not index, lambda: None)
            for index, part in enumerate(parts)
        ]
        values: tuple[Tensor, ...] = (images.clone(),)
        for stage in stages:
            loss = (lambda logits: cross_entropy(logits, labels)) if stage is stages[-1] else None
            values = stage.forward(0, values, loss, is_split)
        returned: tuple[Tensor, ...] = (torch.ones((), dtype=torch.float64),)
        for stage in reversed(stages):
            returned, _ = (stage.backward_input if is_split else stage.backward)(0, returned)
        for stage in stages if is_split else ():
            stage.backward_weight(0)
        check_equal(union([gradients(part) for part in parts]), gradients(whole))

    def test_have_values_that_no_cut_changes(self, target: str) -> None:
        layers = layers_of(own(target), DATA)
        expected = [part.state_dict() for part in parts_of(own(target))]
        for index in reversed(range(len(layers))):
            check_state(build_layer(layers[index], index, SEED, torch.float64), expected[index])
        for first, last in pairwise([0, len(layers) // 2, len(layers)]):
            for index, part in enumerate(
                build_layers(layers, first, last, SEED, torch.float64), first
            ):
                check_state(part, expected[index])


def check_state(part: nn.Module, expected: dict[str, Tensor]) -> None:
    state = part.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


class TestWhole:
    def test_copies_of_a_layer_share_nothing(self) -> None:
        layer = layers_of(own(UNET), DATA)[1]
        first, second = (build_layer(layer, 1, SEED) for _ in range(2))
        check_state(first, second.state_dict())
        ours, theirs = (
            {value.data_ptr() for value in copy.state_dict().values()} for copy in (first, second)
        )
        assert not ours & theirs

    def test_is_constructed_once_for_all_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = layers_of(own(UNET), DATA)
        boundary_shapes(layers, (1, 3, 9, 10))
        from gems.models.imported import parts

        made: list[object] = []

        def counting(*words: object) -> nn.Module:
            made.append(words)
            return construct(*words)  # type: ignore[arg-type]

        monkeypatch.setattr(parts, "construct", counting)
        build_layers(layers, 0, len(layers), SEED)
        assert len(made) == 1

    def test_leaves_the_generators_alone(self) -> None:
        states = torch.get_rng_state(), np.random.get_state()[1].copy()
        model = own(f"{NETS}.ReadsItself")
        layers = layers_of(model, DataConfig(height_px=5, width_px=5))
        build_layers(layers, 0, 1, SEED)
        assert torch.equal(states[0], torch.get_rng_state())
        assert np.array_equal(states[1], np.random.get_state()[1])

    def test_is_on_the_meta_device_where_shapes_are_asked(self) -> None:
        layer = layers_of(own(UNET), DATA)[0]
        assert {
            value.device.type
            for value in build_layer(layer, 0, SEED, device="meta").state_dict().values()
        } == {"meta"}

    def test_a_size_travels_as_the_shape_of_nothing(self) -> None:
        shapes = boundary_shapes(layers_of(own(UNET), DATA), (2, 3, 9, 10))
        carried = [spec for spec in shapes[0] if spec.name.endswith(".sizes")]
        assert sorted(spec.shape for spec in carried) == [(9, 0), (10, 0)]
        assert all(spec.num_bytes == 0 for spec in carried)

    def test_another_batch_than_the_traced_one(self) -> None:
        images, _ = batch(5)
        logits = run_all([part.eval() for part in parts_of(own(UNET))], images)[0]
        assert torch.equal(logits, whole_of(own(UNET)).eval()(images.clone()))

    def test_dropout_of_its_own_forward_ends_with_training(self) -> None:
        parts = parts_of(own(f"{NETS}.Wrapped", drop=0.5))
        images, _ = batch()

        first, second = (run_all(parts, images)[0] for _ in range(2))
        assert not torch.equal(first, second)
        parts = [part.eval() for part in parts]
        first, second = (run_all(parts, images)[0] for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["TwoOutputs", "OnlyInTraining"])
def test_outputs_have_their_structure_in_both_modes(name: str) -> None:
    """Several tensors, and layers that run in training alone.

    A layer that does not run hands on what it gets.
    """
    model = own(f"{NETS}.{name}")
    whole = whole_of(model)
    parts = parts_of(model)
    images = batch()[0]
    for mode in (True, False):
        expected = whole.train(mode)(images.clone())
        output: Any = images.clone()
        for part in parts:
            output = part.train(mode)(*as_tuple(output))
        assert type(output) is type(expected)
        pairs = list(zip(tensors_in(output), tensors_in(expected), strict=True))
        assert pairs and all(torch.equal(ours, theirs) for ours, theirs in pairs)

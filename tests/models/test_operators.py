from __future__ import annotations

import torch

from gems.config.compose import compose
from gems.models import layers_of
from gems.models.blocks.chain import operator_module
from gems.models.build import build_layer
from gems.models.steps import num_branching, operators_of
from tests.helpers.zoo import run_all

RUN = ("data=synthetic", "data.height_px=128", "data.width_px=128", "model.width=4")


def test_inception_is_taken_apart_at_its_forks() -> None:
    spec = compose(["model=inception_v3", *RUN])
    layers = layers_of(spec.model, spec.data)
    operators = operators_of(layers)
    assert len(operators) == 121 and num_branching(operators) == 11
    block = [each for each in operators if layers[each.layer].name == "mixed5b"]
    assert [each.path for each in block] == [
        "steps.0.branches.0.0",
        "steps.0.branches.1.0",
        "steps.0.branches.1.1",
        "steps.0.branches.2.0",
        "steps.0.branches.2.1",
        "steps.0.branches.2.2",
        "steps.0.branches.3.0",
        "steps.0.branches.3.1",
        None,
    ]
    first = operators.index(block[0])
    assert block[-1].predecessors == tuple(first + offset for offset in (0, 2, 5, 7))
    assert [each.predecessors for each in (block[0], block[1], block[3])] == [(first - 1,)] * 3


def test_other_layers_stay_whole() -> None:
    spec = compose(["model=resnet20_v1", *RUN])
    layers = layers_of(spec.model, spec.data)
    operators = operators_of(layers)
    assert [each.name for each in operators] == [layer.name for layer in layers]
    assert [each.predecessors for each in operators] == [
        (),
        *((v,) for v in range(len(layers) - 1)),
    ]
    assert num_branching(operators) == 0


def test_operators_compute_what_their_layers_do_with_their_parameters() -> None:
    spec = compose(["model=inception_v3", *RUN])
    layers = layers_of(spec.model, spec.data)
    operators = operators_of(layers)
    whole = [build_layer(layer, index, 1, torch.float64) for index, layer in enumerate(layers)]
    image = torch.rand(2, 3, 128, 128, dtype=torch.float64)
    expected = run_all(whole, image)
    made: list[torch.Tensor] = []
    names: set[str] = set()
    for operator in operators:
        module = operator_module(
            operator, build_layer(layers[operator.layer], operator.layer, 1, torch.float64)
        )
        made.append(module(*([made[other] for other in operator.predecessors] or [image])))
        names |= {f"{operator.layer}.{name}" for name in module.state_dict()}
    assert torch.equal(made[-1], expected[0])
    assert names == {
        f"{index}.{name}" for index, module in enumerate(whole) for name in module.state_dict()
    }

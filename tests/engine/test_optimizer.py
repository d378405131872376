"""The optimizer: LAMB by its formulas, parameter groups, frozen parameters, and what a rank cannot run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gems.autograd.mixed import Mixed
from gems.config.recipe import OptimizerConfig
from gems.engine.optimization.lamb import Lamb
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.errors import ConfigError
from gems.models.build import freeze

HERE = "tests.engine.test_optimizer"


class Clipping(torch.optim.SGD):
    """Clips by its own norm, as some implementations of LAMB do."""

    def __init__(self, params, lr: float, max_grad_norm: float | None = 1.0) -> None:
        super().__init__(params, lr)
        self.defaults["max_grad_norm"] = max_grad_norm


class Twice(torch.optim.SGD):
    """Needs the loss again."""

    def step(self, closure):
        return super().step(closure)


def network() -> list[NumberedLayer]:
    torch.manual_seed(0)
    modules = {"stem": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 2)}
    return [
        NumberedLayer(index, name, module) for index, (name, module) in enumerate(modules.items())
    ]


def test_lamb_by_the_papers_formulas():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 5))
    gradients = rng.standard_normal((4, 3, 5))
    parameter = nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = Lamb([parameter], lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    mean = np.zeros((3, 5))
    square = np.zeros((3, 5))
    for count, gradient in enumerate(gradients, 1):
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        ratio = (mean / (1 - 0.8**count)) / (np.sqrt(square / (1 - 0.95**count)) + 1e-6)
        step = ratio + 0.3 * weights
        weights = weights - 0.1 * np.linalg.norm(weights) / np.linalg.norm(step) * step
        np.testing.assert_allclose(parameter.detach().numpy(), weights, rtol=1e-12)


def test_groups_are_those_of_the_whole_model_on_every_rank():
    config = OptimizerConfig(
        "adamw", lr=1.0, weight_decay=0.1, decay_norms_and_biases=False, layer_decay=0.5
    )
    layers = network()
    whole = build_optimizer(config, layers, 3).param_groups
    of_rank = build_optimizer(config, layers[1:2], 3).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in whole] == [
        (lr, decay) for lr in (0.25, 0.5, 1.0) for decay in (0.1, 0.0)
    ]
    assert [group["lr"] for group in of_rank] == [group["lr"] for group in whole]
    stem, norm, head = (layer.module for layer in layers)
    wanted = [[stem.weight], [stem.bias], [], [norm.weight, norm.bias], [head.weight], [head.bias]]
    for group, parameters in zip(whole, wanted, strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in parameters}
    assert [len(group["params"]) for group in of_rank] == [0, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb"])
def test_frozen_parameters_do_not_move_and_have_no_state(name):
    layers = network()
    assert freeze([layer[1:] for layer in layers], ["st*", "head.bias", "nothing"]) == {
        "st*",
        "head.bias",
    }
    stem, norm, head = (layer.module for layer in layers)
    before = {
        key: value.clone() for key, value in nn.ModuleList([stem, norm, head]).state_dict().items()
    }
    optimizer = build_optimizer(OptimizerConfig(name, lr=0.1, weight_decay=0.1), layers, 3)
    loss = head(norm(stem(torch.randn(2, 3, 8, 8))).mean((2, 3))).square().sum()
    loss.backward()
    optimizer.step()
    assert torch.equal(stem.weight, before["0.weight"]) and torch.equal(head.bias, before["2.bias"])
    assert not torch.equal(head.weight, before["2.weight"]) and not torch.equal(
        norm.weight, before["1.weight"]
    )
    assert stem.weight not in optimizer.state and head.bias not in optimizer.state


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lamb_changes_each_parameter_as_if_it_were_alone(dtype, weight_decay):
    shapes = [(6, 3, 3, 3), (6,), (4, 6), (5,)]
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    together[-1].data.zero_()  # has no length, so no ratio
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in together]
    optimizers = [
        Lamb(some, lr=0.1, weight_decay=weight_decay)
        for some in (together, *([parameter] for parameter in alone))
    ]
    for step in range(4):
        for parameter, other in zip(together, alone, strict=True):
            has_gradient = step != 2 or parameter.dim() > 1  # else it has taken fewer steps
            parameter.grad = torch.randn_like(parameter) if has_gradient else None
            other.grad = parameter.grad
        for optimizer in optimizers:
            optimizer.step()
        assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_low_copies_follow_weights_that_a_fused_optimizer_changes(name):
    """Its kernels leave the versions of the weights, by which the copies see a change."""
    layer = nn.Linear(3, 2)
    mixed = Mixed(layer, torch.bfloat16)
    numbered = [NumberedLayer(0, "layer", layer)]
    optimizer = build_optimizer(OptimizerConfig(name, lr=0.5, kwargs={"fused": True}), numbered, 1)
    before = mixed.copy(layer, "weight").detach().clone()
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    low = mixed.copy(layer, "weight")
    assert torch.equal(low, layer.weight.bfloat16()) and not torch.equal(low, before)


def test_a_rank_that_trains_nothing_steps():
    build_optimizer(OptimizerConfig("adamw", layer_decay=0.5), [], 3).step()


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        ("torch.optim.LBFGS", {}, "loss of the whole model again"),
        (f"{HERE}.Twice", {}, "loss of the whole model again"),
        (f"{HERE}.Clipping", {}, "train.max_grad_norm=1"),
        ("torch.nn.Linear", {"in_features": 2}, "does not take them"),
    ],
)
def test_what_a_rank_cannot_run(target, kwargs, said):
    with pytest.raises(ConfigError, match=said):
        build_optimizer(OptimizerConfig(target=target, kwargs=kwargs), network(), 3)


def test_an_own_optimizer_gets_its_arguments():
    config = OptimizerConfig(
        target="torch.optim.RAdam", lr=0.5, weight_decay=0.2, kwargs={"betas": [0.8, 0.9]}
    )
    made = build_optimizer(config, network(), 3)
    assert isinstance(made, torch.optim.RAdam)
    assert (made.defaults["lr"], made.defaults["weight_decay"], made.defaults["betas"]) == (
        0.5,
        0.2,
        [0.8, 0.9],
    )
    build_optimizer(
        OptimizerConfig(target=f"{HERE}.Clipping", kwargs={"max_grad_norm": None}), network(), 3
    )

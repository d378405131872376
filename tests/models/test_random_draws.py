"""Random numbers of layers: the same for a micro-batch wherever and whenever it runs.

And modes of a network's own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gems.autograd.random_draws import RandomDraws, draws_numbers
from gems.engine.transport.mpi import Comm
from gems.engine.verification import unsplit
from gems.engine.verification.compare import compare
from gems.errors import ConfigError
from gems.models import layers_of
from gems.models.build import build_layers
from tests.helpers import own_nets
from tests.helpers.own_draws import Drops, Noise
from tests.helpers.toys import make_spec, plan_of

CPU = torch.device("cpu")
NETS = "tests.helpers.own_nets"
OWN = {"model__name": "Own", "data__num_classes": 2, "train__precision": "float64"}


@pytest.fixture(scope="module")
def comm() -> Comm:
    from gems.engine.transport.mpi import world

    return world()


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(0.5), nn.Identity(), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0))
    )


def test_which_modules_draw() -> None:
    found = [name for name, each in network().named_modules() if draws_numbers(each)]
    assert found == ["0", "2.0"]
    assert draws_numbers(nn.MultiheadAttention(4, 2, dropout=0.1)) and draws_numbers(nn.RReLU())
    assert not draws_numbers(nn.LSTM(3, 3, num_layers=2)) and draws_numbers(
        nn.LSTM(3, 3, num_layers=2, dropout=0.1)
    )


def masks(order: list[tuple[int, int]], seed: int = 0) -> dict[tuple[int, int], Tensor]:
    """What dropout leaves of ones for (step, micro-batch), run in an order."""
    made = network().train()
    draws = RandomDraws(seed)
    found = {}
    draws.watch("layer", made)
    for step, micro_batch in order:
        draws.at(step, micro_batch)
        found[step, micro_batch] = made(torch.ones(400))
    return found


def test_numbers_depend_on_seed_step_micro_batch_and_name_alone() -> None:
    first = masks([(0, 0), (0, 1), (1, 0)])
    again = masks([(1, 0), (0, 1), (0, 0)])
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[0, 0], first[0, 1]) and not torch.equal(first[0, 0], first[1, 0])
    assert not torch.equal(first[0, 0], masks([(0, 0)], seed=1)[0, 0])
    # two modules of one network draw apart: about a quarter is left of two halves
    assert 0.15 < float((first[0, 0] != 0).float().mean()) < 0.35


@pytest.mark.parametrize("is_training", [True, False])
def test_the_state_outside_of_a_module_is_left_alone(is_training: bool) -> None:
    made = nn.Sequential(network(), Noise(), Drops(4)).train(is_training)
    RandomDraws(0).watch("layer", made)
    before = torch.get_rng_state()
    for _ in range(2):
        made(torch.ones(2, 4, 3, 3))
        assert torch.equal(torch.get_rng_state(), before)


def test_modules_are_watched_until_they_have_run_without_drawing() -> None:
    """Noise has no rate, and Drops draws in its own forward, before, between and behind modules that do or do not."""
    plain = own_nets.Backbone(4)
    layers = nn.ModuleList([Noise(), Drops(4), plain, nn.Linear(3, 3)]).train()
    values = torch.ones(2, 4, 3, 3)
    draws = RandomDraws(0)
    for number, layer in enumerate(layers):
        draws.watch(f"layer{number}", layer)
    draws.at(0, 0)
    first = [layer(values) for layer in layers[:2]]
    plain(torch.ones(2, 3, 4, 4))
    draws.at(0, 1)
    others = [layer(values) for layer in layers[:2]]
    draws.at(0, 0)
    again = [layer(values) for layer in layers[:2]]
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, others))
    hooked = {type(module) for module in layers.modules() if module._forward_pre_hooks}
    assert hooked == {Noise, Drops, nn.Dropout2d}


def test_a_module_that_two_layers_share_is_watched_once() -> None:
    shared = nn.Dropout(0.5)
    draws = RandomDraws(0)
    for layer in ("one", "two"):
        draws.watch(layer, nn.Sequential(shared))
    assert len(shared._forward_pre_hooks) == 1


def own_spec(name: str, **changes):
    return make_spec("1f1b", 1, model__target=f"{NETS}.{name}", **OWN, **changes)


def test_layers_are_in_the_modes_that_the_networks_own_train_sets() -> None:
    spec = own_spec("KeepsNormFrozen")
    layers = layers_of(spec.model, spec.data)
    norms = [
        each
        for layer in build_layers(layers, 0, len(layers), 0)
        for each in layer.train().modules()
        if isinstance(each, nn.BatchNorm2d)
    ]
    frozen, trained = norms
    assert (frozen.training, frozen.weight.requires_grad) == (False, False)
    assert (trained.training, trained.weight.requires_grad) == (True, True)


def test_dropout_and_a_frozen_norm_are_those_of_the_uncut_network(comm: Comm) -> None:
    found = compare(plan_of(own_spec("KeepsNormFrozen", train__steps=2)), comm, CPU)
    assert found.max_rel_error <= 1e-12


def test_the_uncut_network_is_what_a_run_is_compared_with(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that computes something else as a whole than its layers do is DIFFERENT."""
    real = unsplit.whole_with_parts

    def other(*given):
        whole, parts = real(*given)
        whole.register_forward_hook(lambda _, inputs, output: output * 1.001)
        return whole, parts

    monkeypatch.setattr(unsplit, "whole_with_parts", other)
    assert compare(plan_of(own_spec("KeepsNormFrozen")), comm, CPU).max_rel_error > 1e-6


def test_draws_outside_of_modules_are_said(comm: Comm) -> None:
    with pytest.raises(
        ConfigError, match=r"Wrapped: draws random numbers outside of its modules.*use nn\.Dropout"
    ):
        compare(plan_of(own_spec("Wrapped", model__kwargs={"drop": 0.3})), comm, CPU)

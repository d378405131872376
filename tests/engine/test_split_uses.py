"""Who splits: shared parameters, unknown and changed layers, frozen ones, and what evaluation sees."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gems.autograd.split_backward.layers import SplitLayers
from tests.helpers.split_rig import batches_of, check, make_stage

# --- several uses of one parameter
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [2, 3])
def test_a_layer_that_runs_several_times(times):
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    check([*(part for _ in range(times) for part in (layer, nn.Tanh()))], batches_of((4, 6)))


def test_a_parameter_of_two_layers():
    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    second = nn.Linear(6, 6)
    second.weight = first.weight
    check([first, nn.Tanh(), second], batches_of((4, 6)))


def test_an_embedding_tied_to_the_last_linear_map():
    torch.manual_seed(0)
    embedding = nn.Embedding(7, 6)
    head = nn.Linear(6, 7, bias=False)
    head.weight = embedding.weight
    batches = [(torch.randint(0, 7, (3, 4)),) for _ in range(3)]
    check([embedding, nn.Tanh(), head], batches, is_first=True)


class Scaled(nn.Module):
    """A layer that is not known, and shares its weight with a linear map."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.sin(x @ self.weight)


def test_who_shares_a_parameter_with_an_unknown_layer_is_whole_too():
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    check([layer, Scaled(layer.weight), nn.Linear(6, 6)], batches_of((4, 6)), unsplit=["0", "1"])


def test_another_forward_is_another_layer():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    class Padded(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x * 2, weight, bias)

    class Renamed(nn.Conv2d):
        """The same forward."""

    torch.manual_seed(0)
    layers = [Standardised(4, 4, 3), Padded(4, 4, 3), Renamed(4, 4, 1), nn.PReLU()]
    check(layers, batches_of((2, 4, 8, 8)), unsplit=["0", "1", "3"])


def test_a_weight_that_is_computed_is_whole_at_i():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    check([layer], batches_of((3, 6)), unsplit=["0", "0.parametrizations.weight"])


def test_a_layer_under_autocast_is_whole_at_i():
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x).float()

    torch.manual_seed(0)
    check([Cast()], batches_of((3, 6)), unsplit=["0.layer"])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(6, 6), lambda: nn.Conv1d(4, 4, 3)], ids=["linear", "conv"]
)
def test_a_frozen_parameter_gets_no_gradient(make, frozen):
    torch.manual_seed(0)
    layer = make()
    getattr(layer, frozen).requires_grad_(False)
    check([layer], batches_of((2, 4, 6)))
    assert getattr(layer, frozen).grad is None


# --- order, places
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_micro_batches_add_up_in_the_order_of_their_backward(order):
    torch.manual_seed(0)
    check(
        [nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(80, 5)],
        batches_of((2, 4, 6, 7)),
        order=order,
    )


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6, bias=False)])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (2, 2, 3, 6)], ids=str)
def test_a_layer_in_place_behind_a_linear_map(make, shape):
    torch.manual_seed(0)
    check([make(), nn.ReLU(inplace=True), make()], batches_of(shape))


def test_state_dict_classes_and_copies_stay_as_they_are():
    layer = nn.Conv2d(3, 4, 3)
    before = list(layer.state_dict())
    layers = SplitLayers(nn.ModuleList([layer]))
    assert list(layer.state_dict()) == before and type(layer) is nn.Conv2d
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    x = torch.rand(1, 3, 5, 5)
    assert not twin(x).any() and layer(x).any()
    assert layers.unsplit == ()


def test_evaluation_runs_the_plain_layers():
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    stage = make_stage(layers)
    stage.split_layers()
    stage.modules.eval()
    x = torch.randn(2, 4, 6, 6)
    got = stage.infer((x,))
    assert torch.equal(got, copy.deepcopy(nn.Sequential(*layers)).eval()(x).detach())
    assert stage.num_in_flight == 0

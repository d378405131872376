"""Gradients of a rank as views of one buffer, and what a reduction on one rank does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gems.engine.optimization.gradient_sum import FlatSum
from gems.engine.optimization.gradients import Gradients
from gems.engine.optimization.optimizer import build_optimizer, state_bytes
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.engine.transport.mpi import Transport
from tests.helpers.device import DEVICE, ON_GPU
from tests.helpers.toys import make_spec


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with DEVICE:
        yield


def layers(width: int = 4) -> nn.ModuleList:
    return nn.ModuleList([nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Linear(width, 2)])


@pytest.fixture
def transport(comm):
    opened = Transport(comm, hang_timeout_s=20)
    yield opened
    opened.close()


def test_autograd_adds_into_one_buffer(transport):
    modules = {(0, 0): layers(), (1, 2): layers(6)}
    gradients = Gradients(modules, transport, torch.float32, DEVICE)
    parameters = [p for module in modules.values() for p in module.parameters()]
    places = [p.grad.data_ptr() for p in parameters]
    assert len({p.grad.untyped_storage().data_ptr() for p in parameters}) == 1
    for _ in range(2):
        for module in modules.values():
            x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
            module[2](module[1](module[0](x)).mean((2, 3))).square().sum().backward()
    assert [p.grad.data_ptr() for p in parameters] == places
    assert all(
        bool(p.grad.abs().sum() > 0) for p in (modules[0, 0][0].weight, modules[1, 2][2].bias)
    )
    num_values = sum(p.numel() for p in parameters)
    assert gradients.num_bytes == 4 * num_values  # without copies there is no sum of statistics
    gradients.zero()
    assert all(not bool(p.grad.any()) for p in parameters)
    assert [p.grad.data_ptr() for p in parameters] == places


def test_views_do_not_overlap(transport):
    modules = {
        (0, 1): layers(),
        (1, 1): layers(),
        (0, 2): layers(5),
        (1, 2): layers(5),
        (0, 3): layers(2),
    }
    gradients = Gradients(modules, transport, torch.float32, DEVICE)
    parameters = [p for module in modules.values() for p in module.parameters()]
    for number, parameter in enumerate(parameters):
        parameter.grad.fill_(number)
    assert all(bool((p.grad == number).all()) for number, p in enumerate(parameters))
    gradients.zero()
    assert not any(bool(p.grad.any()) for p in parameters)


def test_two_copies_on_one_rank_get_one_sum_and_the_mean_of_their_statistics(transport):
    """The middle rank of an odd number holds the middle stage in both directions."""
    modules = {(0, 1): layers().double(), (1, 1): layers().double()}
    gradients = Gradients(modules, transport, torch.float64, DEVICE)
    torch.manual_seed(0)
    down, up = modules.values()
    first = [torch.randn_like(p) for p in down.parameters()]
    second = [torch.randn_like(p) for p in up.parameters()]
    for module, values in ((down, first), (up, second)):
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.grad.copy_(value)
    down[1].running_mean.fill_(1.0)
    up[1].running_mean.fill_(4.0)
    down[1].running_var.copy_(torch.arange(4.0))
    up[1].running_var.copy_(torch.arange(4.0) * 3)
    down[1].num_batches_tracked.fill_(7)
    gradients.reduce()
    for one, other, a, b in zip(down.parameters(), up.parameters(), first, second, strict=True):
        assert torch.equal(one.grad, a + b) and torch.equal(other.grad, a + b)
    for module in (down, up):
        assert torch.equal(module[1].running_mean, torch.full((4,), 2.5).double())
        assert torch.equal(module[1].running_var, torch.arange(4.0).double() * 2)
    assert int(down[1].num_batches_tracked) == 7


def test_one_copy_alone_is_left_as_it_is(transport):
    modules = {(0, 0): layers()}
    gradients = Gradients(modules, transport, torch.float32, DEVICE)
    modules[0, 0][1].running_mean.fill_(3.0)
    gradients.reduce()
    assert bool((modules[0, 0][1].running_mean == 3).all())


@pytest.mark.parametrize(("name", "tensors_per_parameter"), [("sgd", 1), ("adam", 2)])
def test_optimizer_state_is_counted(name, tensors_per_parameter):
    config = make_spec(optimizer__name=name).optimizer
    module = nn.Linear(3, 2)
    optimizer = build_optimizer(config, [NumberedLayer(0, "linear", module)], 1)
    assert state_bytes(optimizer) == 0
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counters = 2 * 4 if name == "adam" else 0
    assert state_bytes(optimizer) == tensors_per_parameter * 8 * 4 + counters


def test_frozen_parameters_have_no_gradient_and_no_place_in_the_message(transport):
    module = layers()
    module[0].weight.requires_grad_(False)
    gradients = Gradients({(0, 0): module}, transport, torch.float32, DEVICE)
    assert module[0].weight.grad is None and module[0].bias.grad is not None
    num_trained = sum(p.numel() for p in module.parameters()) - module[0].weight.numel()
    assert gradients.num_bytes == 4 * num_trained


class Posted(NamedTuple):
    """A sum that no poll sees the end of."""

    tensor: Tensor

    def Test(self) -> bool:
        return False


class Doubling:
    """Stands for two ranks with the same values.

    A sum is in place when it is waited for, the last posted first.
    """

    size = 2
    sums_on_device = False

    def __init__(self) -> None:
        self.posted: list[Tensor] = []
        self.waited = 0

    def post_sum(self, tensor: Tensor) -> Posted:
        self.posted.append(tensor)
        return Posted(tensor)

    def wait_sum(self, request: Posted) -> None:
        self.waited += 1
        request.tensor.mul_(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [3, 4, 100])
def test_a_sum_takes_all_buckets_twice_in_a_row(dtype, elements):
    values = torch.arange(10, dtype=dtype, device=DEVICE)
    sums = Doubling()
    summed = FlatSum(values, sums, elements)
    is_staged = ON_GPU or dtype is torch.bfloat16
    for step in (1, 2):
        summed.start()
        summed.poll()
        summed.finish()
        values += 1
        assert values[-1] == {1: 19, 2: 39}[step]
        assert sums.waited == len(sums.posted) == step * (-(-10 // elements) if is_staged else 1)
    assert values.tolist() == [4.0 * value + 3 for value in range(10)]
    assert {tensor.dtype for tensor in sums.posted} == {
        torch.float64 if dtype is torch.float64 else torch.float32
    }
    assert all(tensor is not values for tensor in sums.posted) is is_staged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_sum_that_is_started_holds_the_gradients_of_its_stage_alone(dtype):
    """The stages that start come first in the buffer, and the rest of the message is one sum."""
    modules = {(0, stage): layers(stage + 2).to(dtype) for stage in (0, 3, 5)}
    sums = Doubling()
    ended = []
    gradients = Gradients(modules, sums, dtype, DEVICE, started=[5, 3])
    for step in (1, 2):
        gradients.zero()
        for stage in (5, 3, 0):
            for parameter in modules[0, stage].parameters():
                parameter.grad.fill_(stage + step)
            if stage:
                gradients.start_reduce(stage, lambda size, stage=stage: ended.append((stage, size)))
                gradients.poll()
        gradients.reduce()
        for stage in (0, 3, 5):
            assert all(
                bool((p.grad == 2 * (stage + step)).all()) for p in modules[0, stage].parameters()
            )
        sizes = {
            stage: sum(p.numel() for p in modules[0, stage].parameters()) for stage in (0, 3, 5)
        }
        statistics = 2 * (2 + 5 + 7)
        assert [len(tensor) for tensor in sums.posted] == [
            sizes[5],
            sizes[3],
            sizes[0] + statistics,
        ]
        assert gradients.num_bytes == dtype.itemsize * (sum(sizes.values()) + statistics)
        assert ended == [(stage, sizes[stage] * dtype.itemsize) for stage in (5, 3)]
        sums.posted.clear()
        ended.clear()


def test_a_rank_without_copies_starts_nothing(transport):
    gradients = Gradients(
        {(0, 0): layers(), (0, 1): layers()}, transport, torch.float32, DEVICE, started=[1]
    )
    gradients.start_reduce(1, lambda size: pytest.fail("there is nobody to sum with"))
    gradients.reduce()

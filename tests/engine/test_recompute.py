"""Layers run a second time: gradients, statistics, masks and random numbers are to the bit those of one run."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from gems.autograd.outputs import as_tuple
from gems.autograd.recompute import matmul_outputs as products
from gems.autograd.recompute.recompute import Recomputation, RecomputeContext
from tests.helpers.recompute_rig import (
    CHANNELS,
    NETS,
    SHAPE,
    SIDE,
    Calls,
    ReadFirst,
    batches,
    check,
    conv,
    modules_of,
)


@pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize("name", NETS)
def test_all_is_to_the_bit_as_with_one_run(name, is_selective):
    check(name, is_selective)


@pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_micro_batches_come_back_in_any_order(order, is_selective):
    check("norm_dropout_pool", is_selective, order=order)
    check("own_state", is_selective, order=order)


@pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize("name", ["norm_dropout_pool", "in_place", "attention", "own_state"])
def test_the_second_run_can_leave_its_weight_gradients_for_later(name, is_selective):
    check(name, is_selective, is_split=True)


@pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_and_half_the_bytes(dtype, is_selective):
    for name in ("norm_dropout_pool", "in_place"):
        check(name, is_selective, dtype=dtype, layout=torch.channels_last)


@pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])
def test_a_first_stage_needs_no_input_gradient(is_selective):
    check("in_place", is_selective, needs_gradient=False)


def test_a_net_without_chance_notes_no_random_state():
    for name, draws in (("frozen_norm", False), ("norm_dropout_pool", True)):
        recomputation = Recomputation(modules_of(name))
        _, kept = recomputation.forward(batches(1))
        assert (kept.random is not None) == draws


def test_a_generator_of_the_layer_s_own_draws_the_same_mask():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(x.shape, generator=self.generator)

    masked = Masked()
    recomputation = Recomputation(nn.ModuleList([masked]))
    (leaf,) = batches(1)
    (first,), kept = recomputation.forward((leaf.requires_grad_(),))
    recomputation.forward((leaf,))
    then = masked.generator.get_state()
    (second,) = recomputation.recompute((leaf,), kept)
    assert torch.equal(first, second)
    assert torch.equal(masked.generator.get_state(), then)


@pytest.mark.parametrize("name", ["norm_dropout_pool", "in_place", "frozen_norm", "own_state"])
def test_a_cheap_second_run_runs_no_product(name):
    modules = modules_of(name)
    counts = {}
    for is_selective in (False, True):
        recomputation = Recomputation(modules, is_selective)
        leaves = (batches(1)[0].requires_grad_(),)
        recomputation.forward(leaves)  # compares itself with and without a graph
        with Calls() as first:
            _, kept = recomputation.forward(leaves)
        with Calls() as second:
            made = recomputation.recompute(leaves, kept)
        with Calls() as backward:
            made[0].sum().backward()
        assert first.num_matmuls > 0
        counts[is_selective] = (
            second.num_matmuls,
            backward.names["convolution_backward"],
            second.names["mean"],
        )
        assert second.num_matmuls == (0 if is_selective else first.num_matmuls)
    assert counts[True][1:] == counts[False][1:]


def test_behind_a_kept_product_that_drew_random_numbers_the_next_draw_is_the_same(monkeypatch):
    """On a GPU fused attention draws its dropout itself; here the making of a mask stands for it."""
    monkeypatch.setattr(
        products, "_is_recorded", lambda func: func.overloadpacket is torch.ops.aten.bernoulli
    )

    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.bernoulli(torch.full_like(x, 0.5)) + functional.dropout(x, 0.5)

    recomputation = Recomputation(nn.ModuleList([Drawn()]), is_selective=True)
    (x,) = batches(1)
    (first,), kept = recomputation.forward((x,))
    assert len(list(kept.tensors())) == 1
    with Calls() as calls:
        (second,) = recomputation.recompute((x,), kept)
    assert calls.names["bernoulli"] == 0
    assert torch.equal(first, second)


def test_a_product_that_is_read_and_then_changed_is_computed_again():
    recomputation = Recomputation(nn.ModuleList([ReadFirst()]), is_selective=True)
    (x,) = batches(1)
    _, kept = recomputation.forward((x,))
    assert list(kept.tensors()) == []
    with Calls() as calls:
        recomputation.recompute((x,), kept)
    assert calls.num_matmuls == 1


def test_a_product_that_is_changed_behind_the_layers_is_computed_again():
    modules = nn.ModuleList([conv()])
    recomputation = Recomputation(modules, is_selective=True)
    (x,) = batches(1)
    (out,), kept = recomputation.forward((x,))
    wanted = out.clone()
    out.zero_()
    assert torch.equal(recomputation.recompute((x,), kept)[0], wanted)


def test_cheap_keeps_each_product_and_lets_it_go_when_it_is_used():
    """A sigmoid saves what it gave, not what it was given.

    Behind the second run, nothing holds what was kept.
    """
    modules = nn.ModuleList([conv(), nn.Sigmoid(), conv(), nn.Sigmoid()])
    recomputation = Recomputation(modules, is_selective=True)
    (x,) = batches(1)
    _, kept = recomputation.forward((x,))
    found = list(kept.tensors())
    assert [tuple(tensor.shape) for tensor in found] == [SHAPE, SHAPE]
    assert not any(tensor.requires_grad for tensor in found)
    gone = [StorageWeakRef(tensor.untyped_storage()) for tensor in found]
    del found
    assert [ref.expired() for ref in gone] == [False, False]
    made = recomputation.recompute((x,), kept)
    assert [ref.expired() for ref in gone] == [True, True]
    assert made[0].requires_grad


def test_autograd_saves_the_memory_that_was_kept_and_no_copy_of_it():
    recomputation = Recomputation(
        nn.ModuleList([conv(), nn.BatchNorm2d(CHANNELS)]), is_selective=True
    )
    (x,) = batches(1)
    _, kept = recomputation.forward((x,))
    (product,) = kept.tensors()
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        recomputation.recompute((x,), kept)
    assert [tensor.shape for tensor in seen if tensor.data_ptr() == product.data_ptr()] == [SHAPE]


@pytest.mark.parametrize("has_graph", [False, True])
def test_a_first_run_leaves_nothing_but_what_is_kept(has_graph):
    """Every tensor that a layer made is gone when the next one runs, even if a graph is recorded."""
    made: list[StorageWeakRef] = []
    is_gone: list[bool] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            is_gone.extend(ref.expired() for ref in made)
            out = torch.exp(x)
            made.append(StorageWeakRef(out.untyped_storage()))
            return out * 2

    recomputation = Recomputation(nn.ModuleList([Watched(), conv(), Watched()]))
    recomputation._has_graph = has_graph
    (leaf,) = batches(1)
    outputs, kept = recomputation.forward((leaf.requires_grad_(),))
    assert [ref.expired() for ref in made] == [True, True]
    assert is_gone == [True]
    assert not outputs[0].requires_grad
    assert list(kept.tensors()) == []


class ByGraph(nn.Module):
    """Computes something else without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if torch.is_grad_enabled() else 3)


class Hooked(nn.Module):
    """Fails without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        out = x * 2
        out.register_hook(lambda gradient: gradient)
        return out


@pytest.mark.parametrize(("layer", "has_graph"), [(conv, False), (ByGraph, True), (Hooked, True)])
def test_a_first_run_has_no_graph_if_that_changes_no_bit(layer, has_graph):
    recomputation = Recomputation(nn.ModuleList([nn.BatchNorm2d(CHANNELS), layer()]))
    means = []
    for number in range(2):
        (leaf,) = batches(1)
        (first,), kept = recomputation.forward((leaf.requires_grad_(),))
        means.append(recomputation.modules[0].running_mean.clone())
        (second,) = recomputation.recompute((leaf,), kept)
        assert torch.equal(first, second)
        assert recomputation._has_graph == has_graph
        assert recomputation.modules[0].num_batches_tracked == number + 1
        assert torch.equal(recomputation.modules[0].running_mean, means[-1])


def test_what_is_dropped_is_gone():
    recomputation = Recomputation(modules_of("norm_dropout_pool"), is_selective=True)
    _, kept = recomputation.forward(batches(1))
    gone = [weakref.ref(tensor) for tensor in kept.tensors()]
    assert gone
    kept.drop()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert kept == RecomputeContext()


class Fails(nn.Module):
    """Raises when told so."""

    is_told = False

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(())
        if Fails.is_told:
            raise ValueError("told")
        return x


@pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])
def test_an_exception_in_the_second_run_leaves_all_as_it_was(is_selective, monkeypatch):
    modules = nn.ModuleList([*modules_of("own_state"), nn.Dropout(0.5), Fails(), conv()])
    recomputation = Recomputation(modules, is_selective)
    (x,) = batches(1)
    _, kept = recomputation.forward((x,))
    buffers = dict(modules.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    tracked = [getattr(module, "track_running_stats", None) for module in modules]
    random = torch.get_rng_state()
    monkeypatch.setattr(Fails, "is_told", True)
    with pytest.raises(ValueError, match="told"):
        recomputation.recompute((x,), kept)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(now is buffers[name] for name, now in modules.named_buffers())
    assert all(torch.equal(now, values[name]) for name, now in modules.named_buffers())
    assert [getattr(module, "track_running_stats", None) for module in modules] == tracked
    assert modules[1].calls == 1
    assert list(kept.tensors()) == []
    # neither hooks nor modes are left: a plain run saves what it needs
    x.requires_grad_()
    modules[0](x).sum().backward()
    assert x.grad is not None
    with Calls() as calls:
        modules[0](x)
    assert calls.num_matmuls == 1


@pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])
def test_an_exception_in_the_first_run_leaves_no_hook_behind(is_selective, monkeypatch):
    monkeypatch.setattr(Fails, "is_told", True)
    layer = conv()
    (x,) = batches(1)
    with pytest.raises(ValueError, match="told"):
        Recomputation(nn.ModuleList([layer, Fails()]), is_selective).forward((x,))
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_an_input_that_is_changed_in_place_is_refused():
    recomputation = Recomputation(nn.ModuleList([nn.ReLU(inplace=True)]))
    with pytest.raises(RuntimeError, match=r"input 0 of shape \(2, 4, 8, 8\) is changed in place"):
        recomputation.forward(batches(1))


def test_another_second_run_is_refused():
    class Alternates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.ModuleList([nn.Linear(SIDE, 3), nn.Linear(SIDE, 5)])
            self.turn = [0, 1]  # a list: no number, and so not put back

        def forward(self, x: Tensor) -> Tensor:
            self.turn.reverse()
            return self.maps[self.turn[0]](x)

    (x,) = batches(1)
    recomputation = Recomputation(nn.ModuleList([Alternates()]), is_selective=True)
    _, kept = recomputation.forward((x,))
    with pytest.raises(RuntimeError, match="does not call what it called the first time"):
        recomputation.recompute((x,), kept)


def test_layers_see_the_second_run_s_loss():
    modules = modules_of("norm_dropout_pool")
    recomputation = Recomputation(modules)

    def run(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for module in modules:
            values = as_tuple(module(*values))
        return (values[0].square().sum(),)

    leaves = (batches(1)[0].requires_grad_(),)
    (loss,), kept = recomputation.forward(leaves, run)
    (same,) = recomputation.recompute(leaves, kept, run)
    same.backward()
    assert loss.shape == ()
    assert float(loss) == float(same.detach()) > 0
    assert leaves[0].grad is not None

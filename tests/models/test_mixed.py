"""Mixed precision of a layer beside torch's autocast, and its copies of weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gems.autograd.mixed import low_copies
from gems.models.mixed import Precision, compute_in

BF16 = Precision.of("bf16_mixed")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


@pytest.mark.parametrize("precision", ["bf16_mixed", "fp16_mixed"])
def test_gradients_are_those_of_autocast_added_up_in_float32(precision):
    mixed = compute_in(network(), Precision.of(precision))
    plain = network()
    low = Precision.of(precision).compute
    for number in range(3):
        x = torch.randn(2, 3, 8, 8)
        made = mixed(x.to(low))
        with torch.autocast("cpu", low):
            expected = plain(x.to(low))
        assert made.dtype is low and torch.equal(made, expected)
        gradient = torch.randn(made.shape).to(low)
        made.backward(gradient)
        expected.backward(gradient)
        assert [name for name, _ in mixed.named_parameters()] == [
            name for name, _ in plain.named_parameters()
        ]
        for one, other in zip(mixed.parameters(), plain.parameters(), strict=True):
            assert one.dtype is one.grad.dtype is torch.float32 and torch.equal(
                one.grad, other.grad
            ), number


def clip(weight: torch.Tensor) -> None:
    weight.grad.clamp_(-0.1, 0.1)


def test_hooks_on_gradients_of_weights_are_called_as_under_autocast():
    mixed = compute_in(network(), BF16)
    plain = network()
    for module in (mixed, plain):
        module[0].weight.register_hook(lambda gradient: gradient * 0.5)
        module[4].weight.register_post_accumulate_grad_hook(clip)
    for _ in range(2):
        x = torch.randn(2, 3, 8, 8).bfloat16()
        mixed(x).float().square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            made = plain(x)
        made.float().square().sum().backward()
    for one, other in zip(mixed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert plain[4].weight.grad.abs().max() == pytest.approx(0.1)


def test_weights_are_copied_once_until_they_change():
    """Autocast by itself keeps a copy for each micro-batch in flight."""
    module = compute_in(nn.Linear(512, 512), BF16)
    weight_bytes = 512 * 512 * 2
    copy, bias_copy = low_copies(module)
    assert copy.nbytes == weight_bytes and bias_copy.nbytes == 1024

    def saved_bytes(layer: nn.Module, *inputs: torch.Tensor) -> int:
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made = [layer(x) for x in inputs]
        assert made
        return sum(saved.values())

    inputs = [torch.randn(2, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    assert saved_bytes(module, *inputs) == weight_bytes + sum(x.nbytes for x in inputs)

    plain = nn.Linear(512, 512)

    def autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x)

    assert saved_bytes(autocast, *inputs) == 4 * weight_bytes + sum(x.nbytes for x in inputs)
    before = module(inputs[0])
    with torch.no_grad():
        module.weight.mul_(2)
        module.bias.zero_()
    torch.testing.assert_close(
        module(inputs[0]), nn.functional.linear(inputs[0], module.weight.bfloat16())
    )
    assert not torch.equal(before, module(inputs[0]))


def test_a_failed_forward_leaves_no_autocast_behind():
    module = compute_in(network(), BF16)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 4, 8, 8))
    assert not torch.is_autocast_enabled("cpu") and module[0].weight.dtype is torch.float32


def test_frozen_weights_get_no_gradient():
    module = compute_in(nn.Linear(3, 2), BF16)
    module.weight.requires_grad_(False)
    module(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad is None and bool((module.bias.grad == 1).all())

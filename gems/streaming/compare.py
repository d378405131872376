"""Compare a way to run a module with the module itself: outputs, gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import tensors_in
from gems.autograd.torch_internals import TorchDispatchMode

# The largest difference over the largest value that rounding explains.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
FLOOR = 1e-6  # of the largest value of all tensors: a tensor of smaller values is compared with it
_DRAWS = ("bernoulli", "rand", "normal", "uniform", "exponential")
Values = list[Tensor | None]


class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts a constant in place of random numbers, which strips draw in another order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        name = func.overloadpacket.__name__
        if not name.startswith(_DRAWS):
            raise NotImplementedError(f"draws random numbers by {name}")
        return output.fill_(0.5)


def play(
    module: nn.Module,
    values: Sequence[Tensor],
    run: Callable[..., Any],
    back: Sequence[Tensor | None] | None = None,
    after: Callable[[], None] = lambda: None,
) -> tuple[Values, Values]:
    """Run forward and backward of a module by `run`, and `after` the backward.

    Buffers are restored, and random numbers are the same in each call.

    Returns:
        The outputs, the gradients of inputs and parameters, and the buffers; and the gradients of
            the outputs, which are `back` if given, or random.
    """
    torch.default_generator.manual_seed(1)
    buffers = [(tensor, tensor.detach().clone()) for tensor in module.buffers()]
    parameters = list(module.parameters())
    module.zero_grad()
    leaves = [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in values
    ]
    outputs = list(tensors_in(run([leaf.clone() for leaf in leaves])))
    if back is None:
        back = [torch.randn_like(tensor) if tensor.requires_grad else None for tensor in outputs]
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(outputs, back, strict=True)
        if gradient is not None
    ]
    if pairs:
        torch.autograd.backward(
            [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        )
    after()
    results = [
        *(tensor.detach() for tensor in outputs),
        *(leaf.grad for leaf in leaves),
        *(parameter.grad for parameter in parameters),
        *(tensor.detach().clone() for tensor, _ in buffers),
    ]
    for buffer, before in buffers:
        buffer.data.copy_(before)
    module.zero_grad()
    return results, list(back)


def largest_difference(values: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """Return the largest difference of two tensors over the largest value of the wanted one."""
    largest = max(
        (float(tensor.abs().max()) for tensor in wanted if tensor is not None and tensor.numel()),
        default=0.0,
    )
    return max(
        (
            _difference(one, other, FLOOR * largest)
            for one, other in zip(values, wanted, strict=True)
        ),
        default=0.0,
    )


def _difference(value: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if wanted is None or value is None:
        present = wanted if value is None else value
        return 0.0 if present is None or not present.any() else float("inf")
    if value.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    largest = max(float(wanted.abs().max()), floor)
    return float((value.double() - wanted.double()).abs().max()) / (largest or 1.0)

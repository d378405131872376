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
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made
        name = func.overloadpacket.__name__
        if not name.startswith(_DRAWS):
            raise NotImplementedError(f"draws random numbers by {name}")
        return made.fill_(0.5)


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
    buffers = [(each, each.detach().clone()) for each in module.buffers()]
    parameters = list(module.parameters())
    module.zero_grad()
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in values]
    outputs = list(tensors_in(run([leaf.clone() for leaf in leaves])))
    if back is None:
        back = [torch.randn_like(each) if each.requires_grad else None for each in outputs]
    pairs = [
        (each, gradient)
        for each, gradient in zip(outputs, back, strict=True)
        if gradient is not None
    ]
    if pairs:
        torch.autograd.backward([each for each, _ in pairs], [gradient for _, gradient in pairs])
    after()
    found = [
        *(each.detach() for each in outputs),
        *(leaf.grad for leaf in leaves),
        *(parameter.grad for parameter in parameters),
        *(each.detach().clone() for each, _ in buffers),
    ]
    for buffer, before in buffers:
        buffer.data.copy_(before)
    module.zero_grad()
    return found, list(back)


def largest_difference(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """Return the largest difference of two tensors over the largest value of the wanted one."""
    values = (each for each in wanted if each is not None and each.numel())
    largest = max((float(each.abs().max()) for each in values), default=0.0)
    return max(
        (
            _difference(one, other, FLOOR * largest)
            for one, other in zip(found, wanted, strict=True)
        ),
        default=0.0,
    )


def _difference(found: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if wanted is None or found is None:
        there = wanted if found is None else found
        return 0.0 if there is None or not there.any() else float("inf")
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    largest = max(float(wanted.abs().max()), floor)
    return float((found.double() - wanted.double()).abs().max()) / (largest or 1.0)

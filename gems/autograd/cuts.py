"""Places where a graph of autograd begins without holding the tensor that it begins at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(slots=True)
class Cut:
    """A place where a graph begins, with the gradient that arrives there.

    A graph holds a leaf that requires a gradient until backward, saved or not. So the graph begins
    at an anchor without elements instead, and the tensor bypasses it.
    """

    gradient: Tensor | None = None


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, anchor: Tensor, boxed: tuple[Tensor]) -> Tensor:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return boxed[0].detach()  # separate, so the layers may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.cut.gradient = gradient
        return None, None, None


# without the checks for torch.func of Function.apply, which take as long again
_apply: Callable[..., Tensor] = super(Function, _Begin).apply


def begin(cut: Cut, tensor: Tensor) -> Tensor:
    """Return a tensor at which a graph begins, in the same memory; its gradient goes to `cut`."""
    device = tensor.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return _apply(cut, _anchor(device, stream), (tensor,))  # in a tuple: a leaf would be held


@functools.cache
def _anchor(device: torch.device, stream: torch.cuda.Stream | None) -> Tensor:
    """Return an anchor for graphs on a stream; the backward of another would wait for its own."""
    return torch.empty(0, device=device, requires_grad=True)  # never gets a gradient

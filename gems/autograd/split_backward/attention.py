"""Split backward of nn.MultiheadAttention: its projections are linear maps, and all between them has no weights."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import activation

from gems.autograd.split_backward.deferred import Deferred
from gems.autograd.split_backward.linear import multiply

_HELPERS = ("multi_head_attention_forward", "_in_projection_packed", "_in_projection")


def attend(later: Deferred, name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of nn.MultiheadAttention with torch's own code, in which `linear` is the split one.

    Where a projection cannot be split its backward stays whole; bits are those of torch either way.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = multiply(later, f"{name}.projection", x, weight, bias)
        return functional.linear(x, weight, bias) if made is None else made

    names: dict[str, Any] = {**vars(functional), "linear": linear}
    names |= {helper: _with_names(names[helper], names) for helper in _HELPERS}
    outer = {**vars(activation), "F": SimpleNamespace(**names)}
    return _with_names(nn.MultiheadAttention.forward, outer)(module, *args, **kwargs)


def _with_names(function: Any, names: dict[str, Any]) -> Any:
    """Return a function of the same code that looks its global names up in `names`."""
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made

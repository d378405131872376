"""Split backward of nn.MultiheadAttention: only its projections, linear maps, have weights."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import activation

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.linear import linear_map

_HELPERS = ("multi_head_attention_forward", "_in_projection_packed", "_in_projection")


def attention(deferred: DeferredGradients, name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own forward of nn.MultiheadAttention with split linear maps; bits are those of torch.

    A projection that cannot be split has a full backward.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = linear_map(deferred, f"{name}.projection", x, weight, bias)
        return functional.linear(x, weight, bias) if made is None else made

    names: dict[str, Any] = {**vars(functional), "linear": linear}
    names |= {helper: _with_globals(names[helper], names) for helper in _HELPERS}
    outer = {**vars(activation), "F": SimpleNamespace(**names)}
    return _with_globals(nn.MultiheadAttention.forward, outer)(module, *args, **kwargs)


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """Return a function of the same code with other globals."""
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made

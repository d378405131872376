"""Mixed precision of a layer: parameters of 32 bits, computation and outputs of 16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gems.config.schema import PRECISIONS
from gems.models.outputs import map_tensors

_COPIES = "low_copies"
# Layers whose products autocast computes in the low type; what others read is cast by it at each use.
_PRODUCTS = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention)


class Precision(NamedTuple):
    """The type of parameters, and that of computation and of the tensors between layers."""

    parameters: torch.dtype
    compute: torch.dtype

    @classmethod
    def of(cls, name: str) -> Precision:
        """Return that of a train.precision, or of a torch dtype by name."""
        return cls(*(getattr(torch, word) for word in PRECISIONS.get(name, (name, name))))

    @property
    def is_mixed(self) -> bool:
        """Whether layers compute in another type than that of their parameters."""
        return self.parameters is not self.compute


class _Copy(NamedTuple):
    module: nn.Module
    name: str
    weight: nn.Parameter
    low: nn.Parameter


class _Mixed:
    """Runs the forward of a layer under autocast, on copies of its weights of the low type.

    Autocast alone would copy the weights anew for each micro-batch, and keep the copies until its backward. These are
    copied again only after the weights have changed. Their gradients are added to those of the weights at once.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copies: list[_Copy] = []
        self._contexts: list[AbstractContextManager[Any]] = []
        self._seen: list[tuple[int, int] | None] = []
        made: dict[int, nn.Parameter] = {}
        for module in layer.modules():
            for name, weight in module._parameters.items() if isinstance(module, _PRODUCTS) else ():
                if weight is not None and weight.dtype is torch.float32:
                    low = made.get(id(weight))
                    if low is None:
                        low = made[id(weight)] = _low_copy(weight, dtype)
                    self._copies.append(_Copy(module, name, weight, low))
        self._seen = [None] * len(self._copies)
        self.low_copies = list(made.values())
        layer.register_forward_pre_hook(self._begin)
        layer.register_forward_hook(self._end, always_call=True)

    def _begin(self, layer: nn.Module, given: Any) -> None:
        for index, (module, name, weight, low) in enumerate(self._copies):
            now = weight.untyped_storage()._cdata, weight._version
            if self._seen[index] != now:
                low.data.copy_(weight.data)
                self._seen[index] = now
            low.requires_grad_(weight.requires_grad)
            module._parameters[name] = low
        context = torch.autocast(_device_type(given), dtype=self._dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._contexts.append(context)

    def _end(self, layer: nn.Module, given: Any, made: Any) -> Any:
        self._contexts.pop().__exit__(None, None, None)
        for module, name, weight, _ in self._copies:
            module._parameters[name] = weight
        return _cast(made, self._dtype)


def compute_in(layer: nn.Module, precision: Precision) -> nn.Module:
    """Let a layer compute in the low type of a mixed precision; return the layer."""
    if precision.is_mixed:
        setattr(layer, _COPIES, _Mixed(layer, precision.compute).low_copies)
    return layer


def low_copies(module: nn.Module) -> Iterator[Tensor]:
    """Yield the copies of weights in the low type of the layers in a module."""
    for inner in module.modules():
        yield from vars(inner).get(_COPIES, ())


def _low_copy(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    low = nn.Parameter(weight.detach().to(dtype), weight.requires_grad)
    low.master = weight  # type: ignore[attr-defined]  # to whose gradient a split backward adds

    def give(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        if gradient is None:  # which a split backward adds later
            return
        if weight.grad is None:
            weight.grad = gradient.to(weight.dtype)
        else:
            weight.grad.add_(gradient)

    low.register_post_accumulate_grad_hook(give)  # type: ignore[no-untyped-call]
    return low


def _device_type(given: Any) -> str:
    return next((value.device.type for value in given if isinstance(value, Tensor)), "cpu")


def _cast(made: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor, made)

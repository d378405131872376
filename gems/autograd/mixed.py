"""Mixed precision of a layer: 32-bit parameters, 16-bit computation and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gems.autograd.outputs import map_tensors

_MIXED = "_gems_mixed"
# Layers whose products autocast computes in the low type. Autocast casts the weights of other
# layers at each use.
_PRODUCTS = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention)


class Elsewhere(NamedTuple):
    """A device for which layers are profiled.

    In the context that `casts` returns, its autocast applies to tensors of another device.
    """

    device: torch.device
    casts: Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class _Copy:
    module: nn.Module
    name: str
    weight: nn.Parameter
    low: nn.Parameter
    # the weight's memory and version of which `low` is the copy
    seen: tuple[int, int] | None = None

    def fresh(self) -> nn.Parameter:
        """Return the copy, updated if the weight has changed."""
        now = self.weight.untyped_storage()._cdata, self.weight._version
        if self.seen != now:
            self.low.data.copy_(self.weight.data)
            self.seen = now
        self.low.requires_grad_(self.weight.requires_grad)
        return self.low


class Mixed:
    """The forward of a layer under autocast, with copies of its weights in the low type.

    Autocast alone would copy the weights for each micro-batch, and keep the copies until its
    backward. These copies are only updated after the weights have changed. Their gradients are
    added to those of the weights at once.

    Attributes:
        dtype: The low type.
        elsewhere: The device whose autocast applies, if it is not the device of the tensors.
        low_copies: The copies of weights.
    """

    def __init__(
        self, layer: nn.Module, dtype: torch.dtype, elsewhere: Elsewhere | None = None
    ) -> None:
        setattr(layer, _MIXED, self)  # found by `mixed_of`
        self.dtype = dtype
        self.elsewhere = elsewhere
        self._copies: dict[tuple[int, str], _Copy] = {}
        self._contexts: list[ExitStack] = []
        copies: dict[int, nn.Parameter] = {}
        for module in layer.modules():
            for name, weight in module._parameters.items() if isinstance(module, _PRODUCTS) else ():
                if weight is not None and weight.dtype is torch.float32:
                    low = copies.get(id(weight))
                    if low is None:
                        low = copies[id(weight)] = _low_copy(weight, dtype)
                    self._copies[id(module), name] = _Copy(module, name, weight, low)
        self.low_copies = list(copies.values())
        layer.register_forward_pre_hook(self._begin)
        layer.register_forward_hook(self._end, always_call=True)

    def refresh(self) -> None:
        """Update the copies of weights that have changed."""
        for copy in self._copies.values():
            copy.fresh()

    def has_copy(self, module: nn.Module, name: str) -> bool:
        """Return whether a weight of a module has a copy."""
        return (id(module), name) in self._copies

    def copy(self, module: nn.Module, name: str) -> nn.Parameter:
        """Return the current copy of a weight."""
        return self._copies[id(module), name].fresh()

    def cast(self, output: Any) -> Any:
        """Return the output of the layer's modules in the layer's output type."""
        return map_tensors(
            lambda tensor: tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor,
            output,
        )

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        for copy in self._copies.values():
            copy.module._parameters[copy.name] = copy.fresh()
        contexts = ExitStack()
        contexts.enter_context(torch.autocast(_device_type(inputs), dtype=self.dtype))
        if self.elsewhere is not None:
            contexts.enter_context(self.elsewhere.casts())
        self._contexts.append(contexts)

    def _end(self, layer: nn.Module, inputs: Any, output: Any) -> Any:
        self._contexts.pop().close()
        for copy in self._copies.values():
            copy.module._parameters[copy.name] = copy.weight
        return self.cast(output)


def mixed_of(layer: nn.Module) -> Mixed | None:
    """Return the mixed precision of a layer, or None if it has none."""
    mixed: Mixed | None = vars(layer).get(_MIXED)
    return mixed


def low_copies(module: nn.Module) -> Iterator[Tensor]:
    """Yield the low-type copies of weights of the layers in a module."""
    for inner in module.modules():
        mixed = mixed_of(inner)
        yield from () if mixed is None else mixed.low_copies


def _low_copy(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    low = nn.Parameter(weight.detach().to(dtype), weight.requires_grad)
    low.master = weight  # type: ignore[attr-defined]  # a split backward adds to its gradient

    def give(copy: Tensor) -> None:
        gradient = copy.grad
        copy.grad = None
        if gradient is None:  # a split backward adds the gradient later
            return
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            # backward calls the hooks
            weight.backward(gradient.to(weight.dtype))  # type: ignore[no-untyped-call]
        elif weight.grad is None:
            weight.grad = gradient.to(weight.dtype)
        else:
            weight.grad.add_(gradient)

    low.register_post_accumulate_grad_hook(give)  # type: ignore[no-untyped-call]
    return low


def _device_type(given: Any) -> str:
    return next((value.device.type for value in given if isinstance(value, Tensor)), "cpu")

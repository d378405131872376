"""Choose the layers of a stage that defer weight gradients to W, and replace their forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gems.autograd.split_backward.conv import conv, conv_transposed
from gems.autograd.split_backward.deferred import DeferredGradients, can_wait
from gems.autograd.split_backward.linear import attention, embedding, linear
from gems.autograd.torch_internals import is_transformed

Forward = Callable[..., Any]

# split forward by class; a subclass with its own forward is not split
_SPLIT_FORWARDS: dict[type[nn.Module], Forward] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), conv),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), conv_transposed),
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.MultiheadAttention: attention,
}
# One kernel computes both gradients. Separately they cost 1.44 (batch), 1.56 (group) and 1.09
# (layer) times as much on a CPU (`scripts/bench/split.py`), and the weight gradient would keep two
# tensors of activation size until W.
_UNSPLIT_BY_CHOICE = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class SplitLayers:
    """The layers of one stage whose weight gradients can wait until W.

    Only the `forward` of instances is replaced; outside `defer_to` it runs the class's own. Other
    layers with parameters have a full backward at I: normalisation by choice; all others because
    nothing is known about them, or because hooks on the gradients of their parameters are called at
    I.
    """

    def __init__(self, root: nn.Module) -> None:
        self._deferred: DeferredGradients | None = None
        modules = {name: module for name, module in root.named_modules() if _own_parameters(module)}
        chosen = {
            name: split
            for name, module in modules.items()
            if (split := _split_forward(module)) is not None
            and all(map(can_wait, _own_parameters(module)))
        }
        self._exclude_shared(modules, chosen)
        self._unsplit = {
            name
            for name in modules
            if name not in chosen and not isinstance(modules[name], _UNSPLIT_BY_CHOICE)
        }
        for name, split in chosen.items():
            module = modules[name]
            module.forward = partial(_run, self, name, module, split)

    @property
    def unsplit(self) -> tuple[str, ...]:
        """The names of the layers whose full backward runs at I because it cannot be split.

        If this depends on the call, a layer is listed only after a forward.
        """
        return tuple(sorted(self._unsplit))

    @contextmanager
    def defer_to(self, deferred: DeferredGradients | None) -> Iterator[None]:
        """Make layers that run inside the block defer their weight gradients to `deferred`.

        If it is None, nothing changes.
        """
        before = self._deferred
        self._deferred = deferred
        try:
            yield
        finally:
            self._deferred = before

    def _exclude_shared(self, modules: dict[str, nn.Module], chosen: dict[str, Forward]) -> None:
        """Remove layers from `chosen` that share a parameter with a layer that is not split.

        Half of a sum at I and half at W would round differently.
        """
        while True:
            whole = {
                id(parameter)
                for name, module in modules.items()
                if name not in chosen
                for parameter in _own_parameters(module)
            }
            shared = [
                name
                for name in chosen
                if any(id(parameter) in whole for parameter in modules[name].parameters())
            ]
            if not shared:
                return
            for name in shared:
                del chosen[name]


def _run(
    layers: SplitLayers, name: str, module: nn.Module, split: Forward, *args: Any, **kwargs: Any
) -> Any:
    """Run one layer, split if requested and possible."""
    deferred = layers._deferred
    if "input" in kwargs:
        args = kwargs.pop("input"), *args
    if deferred is not None and torch.is_grad_enabled() and not is_transformed():
        cast = _cast_for(module, args)
        output = None if cast is None else split(deferred, name, module, *cast, **kwargs)
        if output is not None:
            return output
        layers._unsplit.add(name)
    return type(module).forward(module, *args, **kwargs)


def _cast_for(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments as autocast would pass them to a product.

    Return None if autocast would cast the weight too, because its gradient then passes through the
    cast.
    """
    device = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
    if not torch.is_autocast_enabled(device) or isinstance(module, nn.Embedding):
        return args
    low = torch.get_autocast_dtype(device)
    if any(parameter.dtype is torch.float32 for parameter in _own_parameters(module)):
        return None
    return tuple(
        arg.to(low) if isinstance(arg, torch.Tensor) and arg.dtype is torch.float32 else arg
        for arg in args
    )


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _split_forward(module: nn.Module) -> Forward | None:
    """Return the split forward of a layer.

    Return None if its forward is not the forward of a class in the table.
    """
    replaced = vars(module).get("forward")
    if replaced is not None and getattr(replaced, "func", None) is not _run:
        return None
    own = type(module)
    for kind, split in _SPLIT_FORWARDS.items():
        if isinstance(module, kind) and own.forward is kind.forward:
            inner = getattr(kind, "_conv_forward", None)
            return split if getattr(own, "_conv_forward", None) is inner else None
    return None

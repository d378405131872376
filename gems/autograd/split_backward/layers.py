"""Split layers: which layers of a stage leave their weight gradient for W, and how their forward is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gems.autograd.split_backward.attention import attend
from gems.autograd.split_backward.conv import convolve, convolve_transposed
from gems.autograd.split_backward.deferred import Deferred
from gems.autograd.split_backward.linear import embed, linear

Forward = Callable[..., Any]

# The forward of a class -> the one that splits its backward. A class that has another forward is another layer.
_SPLIT: dict[type[nn.Module], Forward] = {
    nn.Conv1d: convolve,
    nn.Conv2d: convolve,
    nn.Conv3d: convolve,
    nn.ConvTranspose1d: convolve_transposed,
    nn.ConvTranspose2d: convolve_transposed,
    nn.ConvTranspose3d: convolve_transposed,
    nn.Linear: linear,
    nn.Embedding: embed,
    nn.MultiheadAttention: attend,
}
# One kernel gives both gradients: apart they cost 1.44 (batch), 1.56 (group) and 1.09 (layer) times as much on a
# processor, and the weight's would hold two tensors of activation size until W.
_WHOLE_AT_I = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class SplitLayers:
    """The layers of one stage whose weight gradient can wait until W.

    Only the instance's `forward` is replaced: classes, parameters and state_dict stay as they are, and outside of
    `into` each layer runs its class's own forward. Convolution, linear, embedding and attention are split.
    Normalisation is whole at I by choice (`scripts/bench/split.py`), and any other layer with parameters because
    nothing is known of it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._later: Deferred | None = None
        self._unsplit: set[str] = set()
        found = {name: module for name, module in root.named_modules() if _own_parameters(module)}
        chosen = {name: split for name, module in found.items() if (split := _split_of(module)) is not None}
        self._refuse_shared(found, chosen)
        self._unsplit = {name for name in found if name not in chosen and not isinstance(found[name], _WHOLE_AT_I)}
        for name, split in chosen.items():
            module = found[name]
            module.forward = partial(_run, self, name, module, split)

    @property
    def unsplit(self) -> tuple[str, ...]:
        """Names of the layers with parameters that run a full backward at I because theirs cannot be split.

        Of a layer that depends on how it is called it is known only after a forward.
        """
        return tuple(sorted(self._unsplit))

    @contextmanager
    def into(self, later: Deferred | None) -> Iterator[None]:
        """Let the layers that run inside leave their weight gradients to `later`; with None they run as ever."""
        before, self._later = self._later, later
        try:
            yield
        finally:
            self._later = before

    def run(self, name: str, module: nn.Module, split: Forward, args: Any, kwargs: Any) -> Any:
        """Run one layer: split where that is asked for and possible."""
        plain = type(module).forward
        later = self._later
        if later is None or not torch.is_grad_enabled():
            return plain(module, *args, **kwargs)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            self._unsplit.add(name)  # the weight's gradient passes through a cast
            return plain(module, *args, **kwargs)
        made = split(later, name, module, *args, **kwargs)
        if made is None:
            self._unsplit.add(name)
            return plain(module, *args, **kwargs)
        return made

    def _refuse_shared(self, found: dict[str, nn.Module], chosen: dict[str, Forward]) -> None:
        """Take those out of `chosen` that share a parameter with a layer that is not split.

        Half of a sum at I and half at W would round otherwise than the sum.
        """
        while True:
            whole = {
                id(parameter)
                for name, module in found.items()
                if name not in chosen
                for parameter in _own_parameters(module)
            }
            shared = [name for name in chosen if any(id(parameter) in whole for parameter in found[name].parameters())]
            if not shared:
                return
            for name in shared:
                del chosen[name]


def _run(layers: SplitLayers, name: str, module: nn.Module, split: Forward, *args: Any, **kwargs: Any) -> Any:
    return layers.run(name, module, split, args, kwargs)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _split_of(module: nn.Module) -> Forward | None:
    """Return the split forward of a layer whose forward, whole, is the one of a class in the table."""
    replaced = vars(module).get("forward")
    if replaced is not None and getattr(replaced, "func", None) is not _run:
        return None
    own = type(module)
    for kind, split in _SPLIT.items():
        if isinstance(module, kind) and own.forward is kind.forward:
            inner = getattr(kind, "_conv_forward", None)
            return split if getattr(own, "_conv_forward", None) is inner else None
    return None

"""One operator of a layer as a module of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gems.models.operators import Operator


class Join(nn.Module):
    """Puts branches together along the channels: (N, C_1, H, W), (N, C_2, H, W), ... to (N, sum of C, H, W)."""

    def forward(self, *branches: Tensor) -> Tensor:
        """Return the joined map."""
        return torch.cat(branches, 1)


class Inner(nn.Module):
    """A part of a layer, with its parameters under the names that they have there."""

    def __init__(self, whole: nn.Module, path: str) -> None:
        super().__init__()
        part = whole.get_submodule(path)
        into: nn.Module = self
        *folders, name = path.split(".")
        for folder in folders:
            into.add_module(folder, nn.Module())
            into = into.get_submodule(folder)
        into.add_module(name, part)
        self._run = [part]  # in a list, so that it is not registered under a second name

    def forward(self, x: Tensor) -> Tensor:
        """Return what the part gives."""
        out: Tensor = self._run[0](x)
        return out


def operator_module(operator: Operator, whole: nn.Module) -> nn.Module:
    """Return the module of an operator; `whole` is that of its layer, of which it takes its own part."""
    if operator.path is None:
        return Join()
    return Inner(whole, operator.path) if operator.path else whole

"""The optimizer of a rank's parameters: one of torch's, or the user's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gems.config.recipe import OPTIMIZERS, OptimizerConfig
from gems.errors import ConfigError
from gems.utils.targets import call_target


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the configured optimizer over the parameters of a rank.

    Copies of a stage get equal gradients, so their optimizers keep equal states without messages.

    Raises:
        ConfigError: a target that cannot be constructed, or that gives no optimizer.
    """
    listed = list(parameters) or [nn.Parameter(torch.empty(0))]  # a rank's layers may have none
    target = config.target or OPTIMIZERS[config.name]
    kwargs = {"lr": config.lr, **config.kwargs}
    if config.target is None:
        kwargs |= {"weight_decay": config.weight_decay}
        kwargs |= {"momentum": config.momentum} if config.name == "sgd" else {}
    made = call_target("optimizer.target", target, kwargs, config.path, listed)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError("optimizer.target", target, f"must give a torch Optimizer, gives {type(made).__name__}")
    return made


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

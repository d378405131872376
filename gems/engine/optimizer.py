"""The optimizers of torch that a run may use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gems.config.schema import TrainConfig


def build_optimizer(train: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum, or Adam, over the parameters of a rank.

    Copies of a stage get equal gradients, so their optimizers keep equal states without messages.
    """
    listed = list(parameters) or [nn.Parameter(torch.empty(0))]  # a rank's layers may have none
    if train.optimizer == "adam":
        return torch.optim.Adam(listed, lr=train.learning_rate, weight_decay=train.weight_decay)
    return torch.optim.SGD(listed, lr=train.learning_rate, momentum=train.momentum, weight_decay=train.weight_decay)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

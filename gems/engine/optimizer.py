"""Optimizers, torch's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gems.config.schema import TrainConfig


def build_optimizer(train: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build SGD with momentum, or Adam, over the parameters that a rank holds.

    The copies of a stage see equal gradients, so their optimizers keep equal states with no message.
    """
    listed = list(parameters) or [nn.Parameter(torch.empty(0))]  # a rank's layers may have none
    if train.optimizer == "adam":
        return torch.optim.Adam(listed, lr=train.learning_rate, weight_decay=train.weight_decay)
    return torch.optim.SGD(listed, lr=train.learning_rate, momentum=train.momentum, weight_decay=train.weight_decay)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of what the optimizer keeps for its parameters."""
    tensors = (
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

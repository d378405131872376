"""The optimizer of a rank's parameters: one of torch's, this toolkit's, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gems.config.recipe import OPTIMIZERS, OptimizerConfig
from gems.engine.optimization.parameter_groups import NumberedLayer, parameter_groups
from gems.errors import ConfigError
from gems.utils.targets import call_target

FUSED = ("sgd", "adam", "adamw")
FORMS = (
    "fused",
    "foreach",
    "differentiable",
)  # of torch's optimizers, of which one excludes others


def build_optimizer(
    config: OptimizerConfig, layers: Iterable[NumberedLayer], num_layers: int
) -> torch.optim.Optimizer:
    """Return the configured optimizer over the trained parameters of a rank's layers.

    Copies of a stage get equal gradients, so their optimizers keep equal states without messages.
    Groups are the same on all ranks; a rank that trains nothing has a parameter without elements.

    Raises:
        ConfigError: a target that cannot be constructed, that gives no optimizer, or one that
            couples the parameters of the whole model, of which a rank has a part.
    """
    target = config.target or OPTIMIZERS[config.name]
    kwargs: dict[str, Any] = {"lr": config.lr, **config.kwargs}
    if config.target is None:
        kwargs = {"weight_decay": config.weight_decay, **kwargs}
        kwargs = ({"momentum": config.momentum} if config.name == "sgd" else {}) | kwargs
    elif config.weight_decay:
        kwargs = {"weight_decay": config.weight_decay, **kwargs}
    groups = parameter_groups(config, layers, num_layers, float(kwargs["lr"]))
    if config.target is None and config.name in FUSED and _may_be_fused(kwargs, groups):
        kwargs["fused"] = True
    if not any(group["params"] for group in groups):
        groups[0]["params"] = [nn.Parameter(torch.empty(0))]
    optimizer = call_target("optimizer.target", target, kwargs, config.path, groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer.target",
            target,
            f"must give a torch Optimizer, gives {type(optimizer).__name__}",
        )
    _refuse_coupled(optimizer, target)
    optimizer.register_step_post_hook(_count_changes)
    return optimizer


def _count_changes(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Let the versions of parameters tell that they have changed, which fused kernels do not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


def _may_be_fused(kwargs: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether one kernel may update many parameters: on a GPU, if the user is silent.

    In 16 bits it would round less often than the other forms, so results would change.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_fit = all(p.is_cuda and p.dtype in (torch.float32, torch.float64) for p in parameters)
    return bool(parameters) and is_fit and kwargs.keys().isdisjoint(FORMS)


def _refuse_coupled(optimizer: torch.optim.Optimizer, target: str) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise ConfigError(
            "optimizer.target",
            target,
            "computes the loss of the whole model again within a step (closure), and a rank has a"
            " part of the model",
            "use one that steps by gradients alone",
        )
    limit = optimizer.defaults.get("max_grad_norm")
    if limit is not None:
        raise ConfigError(
            "optimizer.kwargs",
            f"max_grad_norm: {limit}",
            f"{type(optimizer).__name__} would clip by the norm of one rank's gradients, which depends"
            " on the partition",
            f"set optimizer.kwargs.max_grad_norm=null train.max_grad_norm={limit:g}, which is"
            " exact",
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

"""Parameter groups: which parameters are trained and decayed, and with which learning rate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from gems.config.recipe import OptimizerConfig
from gems.errors import ConfigError

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


class NumberedLayer(NamedTuple):
    """A layer's module, with its place in the whole model, counted from 0."""

    place: int
    name: str
    module: nn.Module


def trained(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield the parameters that are trained: all that require a gradient."""
    return (parameter for parameter in parameters if parameter.requires_grad)


def check_frozen(patterns: Iterable[str], used: Collection[str]) -> None:
    """Raise ConfigError for the first pattern of optimizer.frozen that matches nothing."""
    for pattern in patterns:
        if pattern not in used:
            raise ConfigError(
                "optimizer.frozen",
                pattern,
                "is the name of no layer or parameter of the model",
                "give names or patterns such as layer1.* or *.bias; `gems partition` lists the"
                " layers",
            )


def parameter_groups(
    config: OptimizerConfig, layers: Iterable[NumberedLayer], num_layers: int, lr: float
) -> list[dict[str, Any]]:
    """Return the groups for an optimizer, in the same order on all ranks.

    Some groups may be empty on a rank. A layer's learning rate is `lr` x layer_decay to the power
    of its distance from the last layer. Without `decay_norms_and_biases`, parameters of norms and
    those with one dimension have a group without weight decay.
    """
    depths = range(num_layers) if config.layer_decay != 1 else range(1)
    kinds = (True,) if config.decay_norms_and_biases else (True, False)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for depth in depths:
        for is_decayed in kinds:
            group: dict[str, Any] = {"params": []}
            if len(depths) > 1:
                group["lr"] = lr * config.layer_decay ** (num_layers - 1 - depth)
            if not is_decayed:
                group["weight_decay"] = 0.0
            groups[depth, is_decayed] = group
    seen: set[nn.Parameter] = set()
    for place, _, module in layers:
        for inner in module.modules():
            for parameter in trained(inner.parameters(recurse=False)):
                if parameter not in seen:
                    seen.add(parameter)
                    is_decayed = config.decay_norms_and_biases or not (
                        parameter.dim() <= 1 or _is_norm(inner)
                    )
                    groups[place if len(depths) > 1 else 0, is_decayed]["params"].append(parameter)
    return list(groups.values())


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()

"""Construct the user's network from their own code, and report its errors.

The class is found by its name. An error names the line of the user's code at which it arose.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gems.errors import ConfigError
from gems.models.blocks.parts import freeze_batch_norms, ghost_batch_norms
from gems.utils.targets import call_target, short_name, target_error

CHANGED_NORMS = {"frozen_batch": freeze_batch_norms, "ghost_batch": ghost_batch_norms}
_KEY = "model.target"
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def construct(
    target: str, kwargs: Mapping[str, Any], path: str | None, norm: str = "batch"
) -> nn.Module:
    """Construct the user's network on the current default device, using the host's generators.

    If `norm` is "frozen_batch", its batch norms use their running statistics in training; if it is
    "ghost_batch", they use the statistics of each strip.

    Raises:
        ConfigError: As in `call_target`; or the constructor fails or does not accept the keyword
            arguments; or its result is not a module, has no parameters, has parameters of unknown
            shape, or has no batch norm that `norm` could change.
    """
    module = call_target(_KEY, target, kwargs, path)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            _KEY, target, f"must give a torch.nn.Module, gives {type(module).__name__}"
        )
    if next(module.parameters(), None) is None:
        raise ConfigError(_KEY, target, "has no parameters, so there is nothing to train")
    lazy = next((name for name, value in module.named_parameters() if is_lazy(value)), None)
    if lazy is not None:
        raise ConfigError(
            _KEY, target, f"leaves the shape of {lazy} to its first image, and must say it"
        )
    if norm in CHANGED_NORMS and not CHANGED_NORMS[norm](module):
        raise ConfigError(
            "model.norm", norm, f"changes batch norms, and {target} has none", "leave it out"
        )
    return module


def construct_on_meta(
    target: str, kwargs: Mapping[str, Any], path: str | None, norm: str = "batch"
) -> nn.Module:
    """Construct the network like `construct`, without memory for its weights.

    If the constructor reads its own values, the network is constructed in host memory first.
    """
    with other_generators(0):
        try:
            with torch.device("meta"):
                return construct(target, kwargs, path, norm).to("meta")
        except Exception:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                return construct(target, kwargs, path, norm).to("meta")


@contextmanager
def other_generators(seed: int) -> Iterator[None]:
    """Seed the generators of Python and numpy, which a constructor may use, and restore them."""
    python = random.getstate()
    numpy = np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def refusal(target: str, what: str, error: BaseException, why: str | None = None) -> ConfigError:
    """Return the error that says which step failed for the user's network, and why.

    The error also names the line of the user's code.
    """
    return target_error(_KEY, target, what, error, why)


def place_of_forward(module: nn.Module) -> str:
    """Return "file:line" of a module's forward, or the class's name if it has no source."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return (
        f"{short_name(code.co_filename)}:{code.co_firstlineno}" if code else type(module).__name__
    )


def check_inputs(module: nn.Module, target: str) -> None:
    """Raise ConfigError unless a module's forward takes exactly one batch of images."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in _VARIABLE
    ]
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
    ]
    if len(needed) > 1 or not positional or (needed and needed[0] != positional[0].name):
        needs = ", ".join(needed) or "nothing"
        raise ConfigError(
            _KEY,
            target,
            f"its forward at {place_of_forward(module)} needs {needs}, and gets one batch of"
            " images",
            "give what else it needs a default, or wrap it in a module whose forward takes the"
            " images alone",
        )


def check_momentum(module: nn.Module, target: str) -> None:
    """Raise ConfigError if a batch norm in training averages its statistics over all batches."""
    for name, layer in module.named_modules():
        counts = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.momentum is None
        if counts and layer.training and layer.track_running_stats:
            raise ConfigError(
                _KEY,
                target,
                f"layer {name} has momentum=None, an average over all batches, whose number must be"
                " read in each forward",
                "give it a momentum such as 0.1, or set model.norm=frozen_batch",
            )

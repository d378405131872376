"""The user's own code: a class found by its name and constructed, and the line of it at which something failed."""

from __future__ import annotations

import importlib
import inspect
import linecache
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gems.errors import ConfigError, nearest

# By the name that our code has in tracebacks, which in a snapshot is not that of a file.
_NOT_THEIRS = (Path(torch.__file__).parent, Path(nearest.__code__.co_filename).parent)
_KEY = "model.target"


def load(target: str, path: str | None) -> Callable[..., Any]:
    """Return the class or function that `target` names, "package.module.Class" or "package.module:Class".

    `path` is the folder where the user's packages lie; it stays first in `sys.path`, for what is imported later.

    Raises:
        ConfigError: no such module, none of that name in it, or a module whose import fails.
    """
    module_name, _, name = target.partition(":") if ":" in target else target.rpartition(".")
    if path is not None and path not in sys.path:
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise refusal(target, "needs a module that is not there", error) from error
        where = f"no module named {error.name}" + (f" in {path}" if path else "")
        raise ConfigError(_KEY, target, where, "set model.path to the folder that holds the package") from error
    except Exception as error:
        raise refusal(target, "cannot be imported", error) from error
    found: Any = module
    for word in name.split("."):
        if not hasattr(found, word):
            near = nearest(word, [entry for entry, value in vars(found).items() if callable(value)])
            advice = f"nearest: {', '.join(near)}" if near else ""
            raise ConfigError(_KEY, target, f"nothing named {word} in {module_name}", advice)
        found = getattr(found, word)
    if not callable(found) or isinstance(found, nn.Module):
        raise ConfigError(
            _KEY, target, f"must name a class, or a function that gives a module, and is of type {type(found).__name__}"
        )
    made: Callable[..., Any] = found
    return made


def construct(target: str, kwargs: Mapping[str, Any], path: str | None) -> nn.Module:
    """Construct the user's network on the current default device, from the host's generators as they stand.

    Raises:
        ConfigError: as `load`, keyword arguments that the constructor does not take, a constructor that fails, or
            something that is no module, has no parameters or leaves their shapes open.
    """
    make = load(target, path)
    _check_kwargs(make, target, kwargs)
    try:
        module = make(**kwargs)
    except Exception as error:
        raise refusal(target, "cannot be constructed", error) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(_KEY, target, f"must give a torch.nn.Module, gives {type(module).__name__}")
    if next(module.parameters(), None) is None:
        raise ConfigError(_KEY, target, "has no parameters, so there is nothing to train")
    lazy = next((name for name, value in module.named_parameters() if is_lazy(value)), None)
    if lazy is not None:
        raise ConfigError(_KEY, target, f"leaves the shape of {lazy} to its first image, and must say it")
    return module


def construct_on_meta(target: str, kwargs: Mapping[str, Any], path: str | None) -> nn.Module:
    """Construct the network, as `construct`, without memory for its weights.

    One whose constructor reads its own values goes through the host's memory.
    """
    with other_generators(0):
        try:
            with torch.device("meta"):
                return construct(target, kwargs, path).to("meta")
        except Exception:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                return construct(target, kwargs, path).to("meta")


@contextmanager
def other_generators(seed: int) -> Iterator[None]:
    """Seed the generators of Python and numpy, which a constructor may draw from too, and puts them back."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def refusal(target: str, what: str, error: BaseException, why: str | None = None) -> ConfigError:
    """Return the error that says what cannot be done with the user's network, why, and at which line of their code."""
    if why is None:
        said = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    place = _place(error)
    at = f" at {place}" if place else ""
    return ConfigError(_KEY, target, f"{what}{at}: {why}")


def _place(error: BaseException) -> str:
    """Return "file:line `source`" of the innermost line outside of torch and this toolkit, or nothing."""
    if isinstance(error, SyntaxError):
        return f"{_short(error.filename or '')}:{error.lineno} `{(error.text or '').strip()}`"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if name.startswith("<") or any(folder in Path(name).parents for folder in _NOT_THEIRS):
            continue
        return f"{_short(name)}:{line} `{linecache.getline(name, line).strip()}`"
    return ""


def place_of_forward(module: nn.Module) -> str:
    """Return "file:line" of a module's forward, or the class's name where it has no source."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else type(module).__name__


def _short(name: str) -> str:
    """Return a file's name as seen from the current folder, if it is below."""
    relative = os.path.relpath(name)
    return name if relative.startswith("..") else relative


def _check_kwargs(make: Callable[..., Any], target: str, kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # written in C: it will say so itself
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        empty = inspect.Parameter.empty
        words = ", ".join(str(parameter.replace(annotation=empty)) for parameter in signature.parameters.values())
        text = f"{target} does not take them ({error})"
        raise ConfigError("model.kwargs", dict(kwargs), text, f"it takes ({words})") from error

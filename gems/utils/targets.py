"""What the user names by a target, "package.module.Class": found, called, and refused with the line of their code."""

from __future__ import annotations

import importlib
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gems.errors import ConfigError, nearest

_OURS = Path(nearest.__code__.co_filename).parent  # by its name in tracebacks, which in an archive is no file's


def load_target(key: str, target: str, path: str | None = None) -> Callable[..., Any]:
    """Return the class or function that the key's target names, "package.module.Class" or "package.module:Class".

    `path` is the folder of the user's packages; it stays first in `sys.path`, for what is imported later.

    Raises:
        ConfigError: no such module, none of that name in it, a module whose import fails, or nothing to call.
    """
    module_name, _, name = target.partition(":") if ":" in target else target.rpartition(".")
    if not module_name or not all(word.isidentifier() for word in f"{module_name}.{name}".split(".")):
        raise ConfigError(key, target, "must be package.module.Class or package.module:Class")
    if path is not None and path not in sys.path:
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise target_error(key, target, "needs a module that is not there", error) from error
        where = f"no module named {error.name}" + (f" in {path}" if path else "")
        path_key = f"{key.rpartition('.')[0]}.path"
        raise ConfigError(key, target, where, f"set {path_key} to the folder that holds the package") from error
    except Exception as error:
        raise target_error(key, target, "cannot be imported", error) from error
    for word in name.split("."):
        if not hasattr(found, word):
            near = nearest(word, [entry for entry, value in vars(found).items() if callable(value)])
            advice = f"nearest: {', '.join(near)}" if near else ""
            raise ConfigError(key, target, f"nothing named {word} in {module_name}", advice)
        found = getattr(found, word)
    if not callable(found):
        raise ConfigError(key, target, f"must name a class or a function, and is of type {type(found).__name__}")
    made: Callable[..., Any] = found
    return made


def call_target(key: str, target: str, kwargs: Mapping[str, Any], path: str | None, *args: Any) -> Any:
    """Return what the key's target gives for `args` and `kwargs`.

    Raises:
        ConfigError: as `load_target`, keyword arguments that it does not take, or a call that fails.
    """
    make = load_target(key, target, path)
    check_kwargs(key, make, kwargs, *args)
    try:
        return make(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:
        raise target_error(key, target, "cannot be constructed", error) from error


def check_kwargs(key: str, make: Callable[..., Any], kwargs: Mapping[str, Any], *args: Any) -> None:
    """Check that a callable takes `args` and `kwargs`.

    Raises:
        ConfigError: it does not; with what it takes.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # written in C: it will say so itself
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        empty = inspect.Parameter.empty
        words = ", ".join(str(parameter.replace(annotation=empty)) for parameter in signature.parameters.values())
        name = getattr(make, "__qualname__", type(make).__name__)
        raise ConfigError(
            f"{key.rpartition('.')[0]}.kwargs", dict(kwargs), f"{name} does not take them ({error})",
            f"it takes ({words})",
        ) from error  # fmt: skip


def target_error(key: str, target: str, what: str, error: BaseException, why: str | None = None) -> ConfigError:
    """Return the error that says what cannot be done with the user's code, why, and at which line of it."""
    if why is None:
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    place = _place(error)
    return ConfigError(key, target, f"{what}{f' at {place}' if place else ''}: {why}")


def _place(error: BaseException) -> str:
    """Return "file:line `source`" of the innermost line outside of torch and this toolkit, or nothing."""
    if isinstance(error, SyntaxError):
        return f"{short_name(error.filename or '')}:{error.lineno} `{(error.text or '').strip()}`"
    torch = sys.modules.get("torch")
    not_theirs = {_OURS} if torch is None else {_OURS, Path(str(torch.__file__)).parent}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if name.startswith("<") or not_theirs & set(Path(name).parents):
            continue
        return f"{short_name(name)}:{line} `{linecache.getline(name, line).strip()}`"
    return ""


def short_name(name: str) -> str:
    """Return a file's name as seen from the current folder, if it is below."""
    relative = os.path.relpath(name)
    return name if relative.startswith("..") else relative

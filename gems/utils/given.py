"""Networks and datasets of a running script, under names that a configuration can hold.

A class or function that can be imported becomes its own dotted name. Any other object is kept here
under a name, and handed out to whoever calls the target `gems.utils.given.take`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

from gems.errors import ConfigError

TAKE = f"{__name__}.take"
_objects: dict[str, Any] = {}


def target_of(key: str, value: Any) -> tuple[str, dict[str, Any], str | None]:
    """Return target, keyword arguments and folder that stand for a class, a function, a partial of these, or an object.

    What the script itself defines is found by the script's name, if it may be imported: its own
    call of this toolkit must be under `if __name__ == "__main__":`.
    """
    kwargs: dict[str, Any] = {}
    if isinstance(value, functools.partial) and not value.args:
        value, kwargs = value.func, dict(value.keywords)
    script = getattr(sys.modules["__main__"], "__file__", None)
    is_named = inspect.isclass(value) or inspect.isfunction(value)
    if (
        not is_named
        or "<" in value.__qualname__
        or (value.__module__ == "__main__" and script is None)
    ):
        _objects[key] = value
        # what it prints tells networks of other layers apart
        digest = (
            hashlib.sha256(repr(value).encode()).hexdigest()[:8]
            if hasattr(value, "state_dict")
            else ""
        )
        return (
            TAKE,
            {
                "name": key,
                "what": getattr(value, "__qualname__", type(value).__name__),
                "digest": digest,
            },
            None,
        )
    if value.__module__ != "__main__":
        return f"{value.__module__}:{value.__qualname__}", kwargs, None
    module = Path(str(script)).stem
    sys.modules.setdefault(
        module, sys.modules["__main__"]
    )  # so that its import does not run it again
    return f"{module}:{value.__qualname__}", kwargs, str(Path(str(script)).resolve().parent)


def take(name: str, what: str, digest: str) -> Any:
    """Return the object that the script has handed in under a name.

    A network as a copy, anything else as it is.

    Raises:
        ConfigError: this process has none, as any but the script's own.
    """
    if name not in _objects:
        raise ConfigError(
            f"{name}.target",
            what,
            "was handed in by a script, and this process has it not",
            "run the script again, or give a class that can be imported",
        )
    value = _objects[name]
    if hasattr(value, "state_dict"):
        return copy.deepcopy(value)
    return value() if inspect.isfunction(value) or inspect.isclass(value) else value

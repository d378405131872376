"""Networks and datasets of a running script, under names that a configuration can contain.

A class or function that can be imported is represented by its dotted name. Any other object is
stored here under a name, and returned when the target `gems.utils.given.take` is called.
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
    """Return a target, keyword arguments and a folder that represent `value` in a configuration.

    The value is a class, a function, a partial of these, or an object. If it is defined in the
    script itself, its target contains the script's name. The script must then be importable: its
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
        # the representation distinguishes networks with different layers
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
    # so that importing the script does not run it again
    sys.modules.setdefault(module, sys.modules["__main__"])
    return f"{module}:{value.__qualname__}", kwargs, str(Path(str(script)).resolve().parent)


def take(name: str, what: str, digest: str) -> Any:
    """Return the object that the script has passed under a name.

    A network is copied; anything else is returned unchanged.

    Raises:
        ConfigError: This process is not the script's own, so it does not have the object.
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

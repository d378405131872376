"""The types of a configuration's values, checked against the dataclasses of the schema where no Hydra has done so."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gems.errors import ConfigError

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a mapping"}  # fmt: skip


def check_types(schema: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """Check the values of a dataclass's fields as a file has them, before an object is made of them.

    Raises:
        ConfigError: the first that is of another type; keys that the schema does not know are passed over.
    """
    hints = _hints(schema)
    for key, value in values.items():
        if key in hints:
            _check(f"{prefix}{key}", value, hints[key])


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


def _check(key: str, value: Any, kind: Any) -> None:
    if isinstance(kind, UnionType):
        if value is None:
            return
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    origin = get_origin(kind) or kind
    if origin not in _NAMES:
        return
    is_right = isinstance(value, int | float) if origin is float else isinstance(value, origin)
    if not is_right or (isinstance(value, bool) and origin in (int, float)):
        raise ConfigError(key, value, f"must be {_NAMES[origin]}")
    if origin is list:
        for number, entry in enumerate(value):
            _check(f"{key}[{number}]", entry, get_args(kind)[0])
    elif origin is dict:
        named, held = get_args(kind)
        for name, entry in value.items():
            _check(f"{key}.{name}", name, named)
            _check(f"{key}.{name}", entry, held)

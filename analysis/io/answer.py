"""Answers of `gems ... --json` in files, from which pictures are drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gems.errors import ConfigError

Made = TypeVar("Made")


def from_answer(path: Path, key: str, command: str, make: Callable[[dict[str, Any]], Made]) -> Made:
    """Return what `make` makes of the answer in a file.

    Raises:
        ConfigError: the file, which `key` names, holds no answer of `command`.
    """
    try:
        return make(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(key, path, f"holds no answer of {command} ({error})") from error

"""Answers of `gems ... --json` that are read from files, and tables that are written to them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gems.errors import ConfigError

Made = TypeVar("Made")


def from_answer(path: Path, key: str, command: str, make: Callable[[dict[str, Any]], Made]) -> Made:
    """Return what `make` builds from the answer in a file.

    Raises:
        ConfigError: the file, which `key` names, holds no answer of `command`.
    """
    try:
        return make(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(key, path, f"holds no answer of {command} ({error})") from error


@contextmanager
def refuse_unwritable(path: Path) -> Iterator[None]:
    """Convert an error of the system while a file or folder is written into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError("out", path, f"cannot be written ({error.strerror or error})") from error


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write rows under the keys of the first, an empty field for an unknown figure, and return the path.

    Raises:
        ConfigError: the file cannot be written.
    """
    with refuse_unwritable(path), path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path

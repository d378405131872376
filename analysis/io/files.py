"""Files that are written for the user."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gems.errors import ConfigError


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

"""Write files for the user."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gems.errors import ConfigError


@contextmanager
def refuse_unwritable(path: Path) -> Iterator[None]:
    """Convert an OSError that occurs while a file or folder is written into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError("out", path, f"cannot be written ({error.strerror or error})") from error


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write rows under the keys of the first row, and return the path.

    An unknown figure is an empty field.

    Raises:
        ConfigError: The file cannot be written.
    """
    with refuse_unwritable(path), path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path

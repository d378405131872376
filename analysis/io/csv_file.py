"""Tables as CSV files."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write rows under the keys of the first, an empty field where a figure is not known; gives the path.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path

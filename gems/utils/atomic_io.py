"""JSON files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=indent) + "\n")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or gives an empty one where the file is missing."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError("lists within lists, too deep to be read") from error
    return document if isinstance(document, dict) else {}

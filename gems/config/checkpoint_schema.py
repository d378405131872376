"""The schema of whole checkpoints: which one this version reads, and which one a folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import gems
from gems.errors import ConfigError

SCHEMA = "gems.checkpoint/1"
MANIFEST_JSON = "manifest.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint with a manifest.

    The folder itself, or one in a run or a folder of checkpoints.
    """
    if (folder / MANIFEST_JSON).exists():
        return folder
    inner = folder / "checkpoints"
    manifests = (inner if inner.is_dir() else folder).glob(f"step*/{MANIFEST_JSON}")
    numbered = [path.parent for path in manifests if path.parent.name[4:].isdecimal()]
    return max(numbered, key=lambda path: int(path.name[4:]), default=None)


def other_schema(checkpoint: Path | None) -> str | None:
    """Return the schema of a checkpoint that this version cannot read.

    None if it can, or if nothing is readable.
    """
    try:
        document = (
            json.loads((checkpoint / MANIFEST_JSON).read_text()) if checkpoint is not None else None
        )
    except (OSError, ValueError):
        return None
    schema = document.get("schema", SCHEMA) if isinstance(document, dict) else SCHEMA
    return None if schema == SCHEMA else str(schema)


def schema_error(key: str, value: object, checkpoint: Path, schema: str) -> ConfigError:
    """Return the error for a checkpoint of a schema that this version does not read."""
    return ConfigError(
        key,
        value,
        f"{checkpoint} is a checkpoint of schema {schema}, and this version of gems-train reads"
        f" {SCHEMA}",
        f"use the version that saved it (this is {gems.__version__}), or start anew with"
        " train.resume=never",
    )


def check_schema(key: str, value: object, folder: Path) -> None:
    """Raise ConfigError if the newest checkpoint in a folder is of a schema that this version does not read."""
    checkpoint = newest_checkpoint(folder)
    if checkpoint is not None and (schema := other_schema(checkpoint)) is not None:
        raise schema_error(key, value, checkpoint, schema)

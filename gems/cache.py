"""The cache: results that took long, kept as JSON by what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gems


def cache_folder(configured: str | None = None) -> Path:
    """Gives the folder of the cache: as configured, $GEMS_CACHE_DIR, or the user's own cache folder."""
    if configured:
        return Path(configured)
    if "GEMS_CACHE_DIR" in os.environ:
        return Path(os.environ["GEMS_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gems"


def cached(configured: str | None, kind: str, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Gives the kept result of `make` for this key and version of the toolkit, or makes and keeps it.

    A cache that cannot be written or read is passed over.
    """
    digest = hashlib.sha256(f"{gems.__version__}:{key}".encode()).hexdigest()[:24]
    path = cache_folder(configured) / f"{kind}-{digest}.json"
    try:
        document = json.loads(path.read_text())
        if isinstance(document, dict):
            return document
    except (OSError, ValueError):
        pass
    made = make()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(made))
        partial.replace(path)
    except OSError:
        pass
    return made

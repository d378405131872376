"""The cache: results that took long, kept as JSON by what they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gems


def cache_folder(configured: str | None = None) -> Path:
    """Return the folder of the cache: as configured, $GEMS_CACHE_DIR, or the user's own cache folder."""
    if configured:
        return Path(configured)
    if "GEMS_CACHE_DIR" in os.environ:
        return Path(os.environ["GEMS_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gems"


def cached(configured: str | None, kind: str, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the kept result of `make` for this key and version of the toolkit, or makes and keeps it.

    A cache that cannot be written or read is passed over.
    """
    found = read_cached(configured, kind, key)
    if found is not None:
        return found
    made = make()
    keep_cached(configured, kind, key, made)
    return made


def read_cached(configured: str | None, kind: str, key: str) -> dict[str, Any] | None:
    """Return what is kept for this key and version of the toolkit; None where nothing can be read."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(_path(configured, kind, key).read_text())
        if isinstance(document, dict):
            return document
    return None


def keep_cached(configured: str | None, kind: str, key: str, document: dict[str, Any]) -> None:
    """Keep a result for this key and version of the toolkit, whole or not at all.

    Where that cannot be, nothing happens.
    """
    path = _path(configured, kind, key)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document))
        partial.replace(path)


def _path(configured: str | None, kind: str, key: str) -> Path:
    digest = hashlib.sha256(f"{gems.__version__}:{key}".encode()).hexdigest()[:24]
    return cache_folder(configured) / f"{kind}-{digest}.json"

"""The cache: results that took long to compute, stored as JSON by their inputs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gems
from gems.utils.atomic_io import write_json


def cache_folder(configured: str | None = None) -> Path:
    """Return the folder of the cache.

    It is the configured folder, $GEMS_CACHE_DIR, or the user's own cache folder. A user without a
    home folder gets one in $TMPDIR.
    """
    if configured:
        return Path(configured)
    if "GEMS_CACHE_DIR" in os.environ:
        return Path(os.environ["GEMS_CACHE_DIR"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "gems"
    try:
        return Path.home() / ".cache" / "gems"
    except RuntimeError:  # a user in a container without $HOME and without an entry in passwd
        return Path(tempfile.gettempdir()) / f"gems-cache-{os.getuid()}"


def cached(
    configured: str | None, kind: str, key: str, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result stored for this key and version of the toolkit.

    If there is none, compute and store it.
    """
    document = read_cached(configured, kind, key)
    if document is None:
        document = make()
        keep_cached(configured, kind, key, document)
    return document


def read_cached(configured: str | None, kind: str, key: str) -> dict[str, Any] | None:
    """Return the result stored for this key and version of the toolkit, or None if unreadable."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(_path(configured, kind, key).read_text())
        if isinstance(document, dict):
            return document
    return None


def keep_cached(configured: str | None, kind: str, key: str, document: dict[str, Any]) -> None:
    """Store a result for this key and version of the toolkit, if the cache is writable."""
    with contextlib.suppress(OSError):
        write_json(_path(configured, kind, key), document, indent=None)


def _path(configured: str | None, kind: str, key: str) -> Path:
    digest = hashlib.sha256(f"{gems.__version__}:{key}".encode()).hexdigest()[:24]
    return cache_folder(configured) / f"{kind}-{digest}.json"

"""Detect GPUs on this node without loading their libraries."""

from __future__ import annotations

from pathlib import Path

DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def may_have_gpu() -> bool:
    """Return whether a GPU driver is loaded on this node."""
    return any(path.exists() for path in DRIVER_FILES)

"""Whether this node has GPUs, found without loading what drives them."""

from __future__ import annotations

from pathlib import Path

DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def may_have_gpu() -> bool:
    """Whether a driver of GPUs is loaded on this node."""
    return any(path.exists() for path in DRIVER_FILES)

"""The storage of a run's folder: whether it can be written, has free space, and can be seen by compute nodes."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.units import GIB

MIN_BYTES = 64 << 20  # logs, traces and notes of a small run
MIN_FILES = 1000
LOCAL = ("tmpfs", "ramfs", "devtmpfs")  # in this machine's own memory
SHARED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "pvfs", "orangefs", "daos", "fuse.", "afs", "9p",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a run's folder will be: the nearest existing folder, its file system, and the free space on it.

    `files` is None if the file system does not count them.
    """

    path: Path
    kind: str
    free_bytes: int
    files: int | None

    @property
    def is_shared(self) -> bool | None:
        """Whether other nodes can see it; None if its kind does not tell."""
        if self.kind.startswith(LOCAL):
            return False
        return True if self.kind.startswith(SHARED) else None


def find_storage(spec: RunSpec) -> Storage:
    """Find the storage of a run's folder.

    Raises:
        ConfigError: one cannot write there.
    """
    wanted = RunFolder.of(spec).path
    path = next(each for each in (wanted, *wanted.parents) if os.path.lexists(each))
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        reason = "Permission denied" if path.is_dir() else "Not a directory"
        text = f"cannot write there ({reason}: {path})"
        raise ConfigError("runs_dir", spec.runs_dir, text, "give runs_dir= a folder of yours")
    seen = os.statvfs(path)
    return Storage(path, _kind(path.resolve()), seen.f_bavail * seen.f_frsize, seen.f_favail if seen.f_files else None)


def check_free_space(spec: RunSpec, storage: Storage, needed_bytes: int = 0) -> str:
    """Check the free space against what a run writes, and describe it; quotas are not seen.

    Raises:
        ConfigError: it does not fit.
    """
    needed, free, error = max(needed_bytes, MIN_BYTES), f"{storage.free_bytes / GIB:.2f} GiB", None
    if storage.free_bytes < needed:
        error = f"{free} are free there, and the run writes {needed / GIB:.2f} GiB"
    elif storage.files is not None and storage.files < MIN_FILES:
        error = f"only {storage.files} more files can be made there"
    if error is not None:
        raise ConfigError("runs_dir", spec.runs_dir, error, "free some, or give another folder")
    return f"{storage.path} on {storage.kind}, {free} free"


def _kind(path: Path) -> str:
    """Return the type of the file system that holds a path, by the longest mount point above it."""
    best, kind = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            fields = line.split(" ")
            if len(fields) > 2:
                point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[1])
                if len(point) >= len(best) and path.is_relative_to(point):
                    best, kind = point, fields[2]
    return kind

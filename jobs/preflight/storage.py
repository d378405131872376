"""The place of a run's folder: whether it can be written, has room, and is one that compute nodes see."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder

GIB = 1 << 30
MIN_BYTES = 64 << 20  # logs, traces and notes of a small run
MIN_FILES = 1000
OF_THE_NODE = ("tmpfs", "ramfs", "devtmpfs")  # in this machine's own memory
SHARED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "panfs",
    "wekafs",
    "pvfs",
    "orangefs",
    "daos",
    "fuse.",
    "afs",
    "9p",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's folder will lie: the nearest folder that is there, its file system, and what is free on it.

    `files` is None where the file system does not count them.
    """

    path: Path
    kind: str
    free_bytes: int
    files: int | None

    @property
    def is_shared(self) -> bool | None:
        """Whether other nodes can see it; None where its kind does not say."""
        if self.kind.startswith(OF_THE_NODE):
            return False
        return True if self.kind.startswith(SHARED) else None


def place_of(spec: RunSpec) -> Place:
    """Check at the place of a run's folder.

    Raises:
        ConfigError: one cannot write there.
    """
    wanted = RunFolder.of(spec).path
    path = next(each for each in (wanted, *wanted.parents) if os.path.lexists(each))
    reason = "Not a directory" if not path.is_dir() else "Permission denied"
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            "runs_dir", spec.runs_dir, f"cannot write there ({reason}: {path})", "give runs_dir= a folder of yours"
        )
    seen = os.statvfs(path)
    return Place(path, _kind(path.resolve()), seen.f_bavail * seen.f_frsize, seen.f_favail if seen.f_files else None)


def check_room(spec: RunSpec, place: Place, needed_bytes: int = 0) -> str:
    """Check what is free against what a run leaves, and says both. A quota is not seen.

    Raises:
        ConfigError: it does not fit.
    """
    needed = max(needed_bytes, MIN_BYTES)
    if place.free_bytes < needed:
        raise ConfigError(
            "runs_dir", spec.runs_dir, f"{_gib(place.free_bytes)} are free there, and the run leaves {_gib(needed)}",
            "make room, or give another folder",
        )  # fmt: skip
    if place.files is not None and place.files < MIN_FILES:
        raise ConfigError(
            "runs_dir", spec.runs_dir, f"only {place.files} more files can be made there", "make room, or give another"
        )
    return f"{place.path} on {place.kind}, {_gib(place.free_bytes)} free"


def _kind(path: Path) -> str:
    """Return the type of the file system that holds a path, by the longest mount point above it."""
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for fields in (line.split(" ") for line in lines):
        if len(fields) > 2:
            point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[1])
            if len(point) >= len(best) and path.is_relative_to(point):
                best, kind = point, fields[2]
    return kind


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"

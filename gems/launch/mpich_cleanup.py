"""Remove MPICH's shared-memory files that outlive killed ranks.

The command is `python -m gems.launch.mpich_cleanup`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
MIN_AGE_S = 2.0


def remove_stale_shared_memory(folder: Path = FOLDER, min_age_s: float = MIN_AGE_S) -> list[Path]:
    """Remove MPICH's shared-memory files of this user that no process maps, and return their paths.

    They remain after ranks are killed, and are named by SLURM's job and step: a requeued job on the
    same node attaches to the old file and hangs. Files that processes map, or that may be new
    (younger than `min_age_s`), belong to another run and stay.
    """
    now_s = time.time()
    stale = []
    for path in sorted(folder.glob("mpich_shm_*")):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and now_s - status.st_mtime >= min_age_s:
                stale.append(path)
    if not stale:
        return []
    mapped = _mapped_by_own_processes()
    removed = []
    for path in stale:
        if str(path.resolve()) not in mapped:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _mapped_by_own_processes() -> set[str]:
    # a process that hides its memory is not a rank, and a process keeps a file that it has mapped
    # even after the name is removed
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                mapped.update(region.path for region in process.memory_maps())
    return mapped


if __name__ == "__main__":
    for path in remove_stale_shared_memory():
        print(f"gems: removed stale {path}", file=sys.stderr)

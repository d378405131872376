"""Host memory of this process: the resident size, and how the C library allocates."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import psutil

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_THRESHOLD_BYTES = 32 << 20  # the limit of glibc
KEPT_BYTES = 1 << 30


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def resident_bytes(name: str) -> int:
    """Return VmRSS or VmHWM (its peak) of this process; needs Linux."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def release_freed_memory() -> None:
    """Return freed blocks to the kernel, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 32 MB for the next tensor, and return whether it does.

    By default it returns each block to the kernel at once. Every activation and gradient of a step
    then costs a page fault for each 4 KiB; on a processor this is a third of the time of a ResNet
    stage's backward. The process's memory stays at its peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(option, num_bytes) == 1
        for option, num_bytes in (
            (M_MMAP_THRESHOLD, LARGEST_THRESHOLD_BYTES),
            (M_TRIM_THRESHOLD, KEPT_BYTES),
        )
    )

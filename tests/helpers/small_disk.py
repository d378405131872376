"""A small file system of its own, which a test may fill or remount; it needs the right to mount."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs, and a file that leaves no room on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leave no block free."""
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Remove what `fill` wrote."""
        self._filler.unlink()

    def remount(self, option: str) -> None:
        """Mount it again, `ro` or `rw`."""
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.path)], check=True, timeout=20)


@contextlib.contextmanager
def small_disk(path: Path, kib: int) -> Iterator[SmallDisk]:
    """Mount a tmpfs of so many KiB; the test is skipped where that is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)]
    with contextlib.suppress(OSError):
        refusal = subprocess.run(words, capture_output=True, text=True, timeout=20)
        if refusal.returncode == 0:
            try:
                yield SmallDisk(path)
            finally:
                subprocess.run(["umount", "--lazy", str(path)], timeout=20)
            return
    pytest.skip("no right to mount a tmpfs")


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nothing be written to a folder, though files beside it are open.

    The test is skipped where one cannot.
    """
    try:
        subprocess.run(
            ["mount", "--bind", folder, folder], check=True, capture_output=True, timeout=20
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a folder")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True, timeout=20)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], timeout=20)

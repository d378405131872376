"""Files that appear complete or not at all, and files with reserved space on a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

RESERVE = ".reserve"  # folder of the files that `reserve` allocates
RESERVE_BYTES = 1 << 13
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def atomic_write(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which is moved to `path` at the end, or removed after an error.

    With `sync` the file and its name also survive a power failure.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if sync:
            sync_to_disk(partial)
        partial.replace(path)
    except OSError as error:
        if error.filename is None:  # a write to an open file sets no name
            error.filename = str(path)
        raise
    # after a success too: replacing a file by a hard link to itself changes nothing (POSIX)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


def distinct(names: Iterable[str]) -> list[str]:
    """Return file names in which repeated names get a number from 2 on at their end."""
    unique: dict[str, None] = {}
    for name in names:
        unused = name
        count = 1
        while unused in unique:
            count += 1
            unused = f"{name}_{count}"
        unique[unused] = None
    return list(unique)


def sync_to_disk(path: Path) -> None:
    """Sync a file's content, or the names in a folder.

    Raises:
        OSError: The path does not exist, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file atomically, and create its folder.

    On a full disk, write to the space that `reserve` allocated for it.
    """
    text = json.dumps(document, indent=indent) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(text)
    except OSError as error:
        if error.errno not in DISK_FULL or not _reserve_path(path).exists():
            raise
        _write_to_reserve(path, text.encode())


def reserve(path: Path) -> None:
    """Allocate space for one more version of a file, so that `write_json` works on a full disk.

    Raises:
        OSError: There is no space.
    """
    spare = _reserve_path(path)
    spare.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(spare) as partial:
        partial.write_bytes(b" " * RESERVE_BYTES)  # real bytes, so the file is not sparse


def _write_to_reserve(path: Path, text: bytes) -> None:
    """Write to the allocated file, and swap the two files by renaming only.

    The old file is the next reserve.
    """
    spare = _reserve_path(path)
    old = spare.with_name(f"{spare.name}.old")
    with spare.open("r+b", buffering=0) as file:
        file.write(text.ljust(spare.stat().st_size))  # JSON may end in spaces
    with contextlib.suppress(FileNotFoundError):
        old.unlink(missing_ok=True)
        os.link(path, old)
    spare.replace(path)
    if old.exists():
        old.replace(spare)


def _reserve_path(path: Path) -> Path:
    return path.parent / RESERVE / path.name


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing or is not an object.

    Raises:
        OSError, ValueError: The file cannot be read.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError("lists within lists, too deep to be read") from error
    return document if isinstance(document, dict) else {}


def read_yaml(text: str) -> Any:
    """Return the document of a YAML text.

    Raises:
        yaml.YAMLError: It is not YAML.
    """
    return yaml.load(text, _YAML_LOADER)

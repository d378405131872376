"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_write(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which is moved to `path` at the end, or removed after an error.

    With `sync` the file and its name survive a power failure too.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if sync:
            sync_to_disk(partial)
        partial.replace(path)
    finally:  # after a success too: replacing a file by a hard link to itself changes nothing (POSIX)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


def distinct(names: Iterable[str]) -> list[str]:
    """Return names of files, those that recur with a number from 2 on at their end."""
    found: dict[str, None] = {}
    for name in names:
        unused, count = name, 1
        while unused in found:
            count += 1
            unused = f"{name}_{count}"
        found[unused] = None
    return list(found)


def sync_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's names.

    Raises:
        OSError: it does not exist, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file atomically, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(document, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing or holds something else.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError("lists within lists, too deep to be read") from error
    return document if isinstance(document, dict) else {}

"""What all trace files share: opening, the schema's version, attributes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")  # parallel file systems refuse the lock
import h5py

from gems.errors import ConfigError
from gems.trace.layout import SCHEMA_VERSION


@contextlib.contextmanager
def open_trace(path: Path) -> Iterator[h5py.File]:
    """Open a trace file or a part to read, when it is one of a version known here.

    Raises:
        ConfigError: the file is missing, unreadable, of another layout, or of a newer major schema.
    """
    try:
        with h5py.File(path, "r") as file:
            _check_version(path, file)
            yield file
    except (OSError, KeyError) as error:
        raise ConfigError(
            "trace", path, "not a readable trace file", f"give a trace.h5 of a run folder ({error})"
        ) from error


def _check_version(path: Path, file: h5py.File) -> None:
    version = str(file.attrs.get("schema_version", "none"))
    major = version.split(".")[0]
    if not major.isdigit() or int(major) > int(SCHEMA_VERSION.split(".")[0]):
        raise ConfigError(
            "trace", path, f"schema {version} cannot be read here (known: {SCHEMA_VERSION})", "update this toolkit"
        )


def set_attributes(file: h5py.File, attributes: Mapping[str, Any]) -> None:
    """Write root attributes: numbers, texts, and lists of one of these."""
    for name, value in attributes.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
            file.attrs[name] = np.array(value, dtype=h5py.string_dtype())
        else:
            file.attrs[name] = value


def get_attributes(file: h5py.File) -> dict[str, Any]:
    """Read root attributes as plain Python values."""
    return {name: _plain(value) for name, value in file.attrs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value

"""Trace files: open them, read and write their attributes and whole traces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")  # parallel file systems refuse locks
import h5py

from gems.errors import ConfigError
from gems.trace.layout import (
    COLUMNS,
    DEFAULTS,
    DTYPES,
    KINDS,
    LATER_TABLES,
    SCHEMA_VERSION,
    STREAMS,
    LayerTimes,
    Trace,
)
from gems.utils.atomic_io import atomic_write


@contextlib.contextmanager
def open_trace(path: Path) -> Iterator[h5py.File]:
    """Open a trace file, or one rank's part of it, for reading.

    Raises:
        ConfigError: The file is missing, unreadable, of another layout, or of a newer major schema.
    """
    try:
        with h5py.File(path, "r") as file:
            version = str(file.attrs.get("schema_version", "none"))
            major = version.split(".")[0]
            if not major.isdigit() or int(major) > int(SCHEMA_VERSION.split(".")[0]):
                raise ConfigError(
                    "trace",
                    path,
                    f"schema {version} cannot be read here (known: {SCHEMA_VERSION})",
                    "update this toolkit",
                )
            yield file
    except (OSError, KeyError) as error:
        raise ConfigError(
            "trace", path, "not a readable trace file", f"give a trace.h5 of a run folder ({error})"
        ) from error


def set_attributes(file: h5py.File, attributes: Mapping[str, Any]) -> None:
    """Write root attributes: numbers, strings, or lists of one of these types."""
    for name, value in attributes.items():
        if (
            isinstance(value, (list, tuple))
            and value
            and all(isinstance(item, str) for item in value)
        ):
            file.attrs[name] = np.array(value, dtype=h5py.string_dtype())
        else:
            file.attrs[name] = value


def get_attributes(file: h5py.File) -> dict[str, Any]:
    """Return the root attributes as plain Python values."""
    return {name: _plain(value) for name, value in file.attrs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value


def write_trace(path: Path, trace: Trace) -> None:
    """Write a whole trace, with `units` and `long_name` for each column.

    The file appears complete or not at all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial, h5py.File(partial, "w") as file:
        set_attributes(file, {**trace.attributes, "schema_version": SCHEMA_VERSION})
        for name, columns in COLUMNS.items():
            group = file.create_group(name)
            table = getattr(trace, name)
            for column, _, units, long_name in columns:
                compress = (
                    {"compression": "gzip", "compression_opts": 1, "shuffle": True}
                    if len(table)
                    else {}
                )
                dataset = group.create_dataset(
                    column, data=np.ascontiguousarray(table[column]), **compress
                )
                dataset.attrs["units"], dataset.attrs["long_name"] = units, long_name
        file["events"].attrs["kinds"] = list(KINDS)
        file["events"].attrs["streams"] = list(STREAMS)
        text = h5py.string_dtype()
        schedule = file.create_group("schedule")
        schedule.attrs["sha256"] = trace.schedule_sha256
        rows = np.array(trace.schedule_rows, dtype=object)
        for dataset, long_name in (
            (
                file.create_dataset("run_yaml", data=trace.run_yaml, dtype=text),
                "resolved configuration, YAML",
            ),
            (
                schedule.create_dataset("rows", data=rows, dtype=text),
                "actions of each rank of a pipeline, in order",
            ),
            (
                file.create_dataset("memory_plan", data=trace.memory_plan, dtype=text),
                "segments of each stage and their policies, JSON; empty where activations are kept",
            ),
            (
                file.create_dataset(
                    "partition/boundaries", data=np.array(trace.boundaries, dtype="i8")
                ),
                "first layer of each stage, and the number of layers",
            ),
        ):
            dataset.attrs["units"], dataset.attrs["long_name"] = "1", long_name


def read_column(file: h5py.File, table: str, column: str) -> Any:
    """Return a column of an open trace, or its default if the trace is older than the column."""
    default = DEFAULTS.get((table, column))
    if default is not None and column not in file[table]:
        return default
    return file[table][column][()]


def read_trace(path: Path) -> Trace:
    """Read a whole trace.

    Raises:
        ConfigError: The file is missing, unreadable, or of a newer major schema.
    """
    with open_trace(path) as file:
        tables: dict[str, Any] = {}
        for name, columns in COLUMNS.items():
            if name in LATER_TABLES and name not in file:
                tables[name] = np.empty(0, DTYPES[name])
                continue
            table = np.empty(len(file[name][columns[0][0]]), DTYPES[name])
            for column, *_ in columns:
                table[column] = read_column(file, name, column)
            tables[name] = table
        layer_times = None
        if "profile" in file:
            group = file["profile"]
            times = (
                tuple(map(float, group[name][()]))
                for name in ("forward_s", "input_grad_s", "weight_grad_s")
            )
            layer_times = LayerTimes(str(group.attrs["source"]), *times)
        return Trace(
            attributes=get_attributes(file),
            run_yaml=file["run_yaml"].asstr()[()],
            schedule_rows=tuple(file["schedule/rows"].asstr()[()]),
            schedule_sha256=str(file["schedule"].attrs["sha256"]),
            boundaries=tuple(int(b) for b in file["partition/boundaries"][()]),
            memory_plan=file["memory_plan"].asstr()[()] if "memory_plan" in file else "",
            layer_times=layer_times,
            **tables,
        )

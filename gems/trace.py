"""The trace file: one HDF5 layout for measured, emulated and simulated runs.

A finished run has one file with a group of columns each for `/events`, `/steps`, `/rank_steps` and `/samples`. While it runs,
every rank has a part of its own, with the same rows as compound tables: one write a step instead of thirteen, and
readable after SIGKILL (default libver, flushed at step ends).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")  # parallel file systems refuse the lock
import h5py

from gems.errors import ConfigError

SCHEMA_VERSION = "1.0"
SOURCES = ("measured", "emulated", "simulated")
KINDS = ("F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "STEP")
STREAMS = ("compute", "link")

COLUMNS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "events": (
        ("rank", "i4", "1", "world rank"),
        ("step", "i4", "1", "optimizer step"),
        ("kind", "i2", "1", "action kind, index into the attribute kinds"),
        ("stage", "i4", "1", "stage"),
        ("segment", "i4", "1", "segment of the stage, -1 for the whole"),
        ("direction", "i1", "1", "0 down, 1 up"),
        ("micro_batch", "i4", "1", "micro-batch of the step, -1 for none"),
        ("stream", "i1", "1", "stream, index into the attribute streams"),
        ("start_ns", "i8", "ns", "begin on rank 0's clock; of a transfer, its posting"),
        ("end_ns", "i8", "ns", "end on rank 0's clock; of a transfer, the time it was seen complete"),
        ("moved_bytes", "i8", "byte", "bytes carried"),
        ("device_bytes", "i8", "byte", "bytes held on the device when the action ended"),
        ("host_bytes", "i8", "byte", "bytes held in host memory when the action ended"),
    ),
    "steps": (
        ("step", "i4", "1", "optimizer step"),
        ("start_ns", "i8", "ns", "first rank's begin"),
        ("end_ns", "i8", "ns", "last rank's end"),
        ("images", "i8", "1", "images of all directions and replicas"),
        ("loss", "f8", "1", "mean training loss over all images of the step"),
        ("is_warmup", "i1", "1", "1 for a step left out of figures"),
    ),
    "rank_steps": (
        ("rank", "i4", "1", "world rank"),
        ("step", "i4", "1", "optimizer step"),
        ("start_ns", "i8", "ns", "begin on this rank"),
        ("end_ns", "i8", "ns", "end on this rank"),
        ("images", "i8", "1", "images of all directions and replicas"),
        ("loss", "f8", "1", "mean training loss of the step, where this rank knows it; NaN elsewhere"),
        ("is_warmup", "i1", "1", "1 for a step left out of figures"),
    ),
    "samples": (
        ("rank", "i4", "1", "world rank"),
        ("t_ns", "i8", "ns", "time on rank 0's clock"),
        ("device_bytes", "i8", "byte", "device memory in use as the driver reports it, -1 without a GPU"),
        ("rss_bytes", "i8", "byte", "resident memory of the process"),
        ("power_w", "f8", "W", "power draw of the device, NaN without a GPU"),
        ("utilisation", "f8", "1", "share of time in which the device computed, NaN without a GPU"),
    ),
}
PART_TABLES = ("events", "rank_steps", "samples")
DTYPES = {
    name: np.dtype([(column, kind) for column, kind, _, _ in columns]) for name, columns in COLUMNS.items()
}
_TIMES = ("start_ns", "end_ns", "t_ns")


@dataclass(slots=True)
class Trace:
    """A trace in memory: structured arrays of the tables in `COLUMNS`, the root attributes and the texts."""

    attributes: dict[str, Any]
    events: np.ndarray = field(default_factory=lambda: np.empty(0, DTYPES["events"]))
    steps: np.ndarray = field(default_factory=lambda: np.empty(0, DTYPES["steps"]))
    rank_steps: np.ndarray = field(default_factory=lambda: np.empty(0, DTYPES["rank_steps"]))
    samples: np.ndarray = field(default_factory=lambda: np.empty(0, DTYPES["samples"]))
    run_yaml: str = ""
    schedule_rows: tuple[str, ...] = ()
    schedule_sha256: str = ""
    boundaries: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        """One of measured, emulated, simulated."""
        return str(self.attributes["source"])

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.attributes["world_size"])


def root_attributes(source: str, signature: str, world_size: int, **more: Any) -> dict[str, Any]:
    """Gives the root attributes that every trace has, and `more`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source,
        "signature": signature,
        "world_size": world_size,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    }


class TracePart:
    """One rank's part of a trace while the run goes on. Rows are kept until `flush`, at step ends."""

    def __init__(self, path: Path, rank: int, attributes: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self._file = h5py.File(path, "w")
        _set_attributes(self._file, {**attributes, "rank": rank})
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in PART_TABLES}
        self._tables = {
            name: self._file.create_dataset(name, (0,), DTYPES[name], maxshape=(None,), chunks=(1024,))
            for name in PART_TABLES
        }
        self._file.flush()

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        """Keeps one row (all columns of `COLUMNS[table]`, in order) for the next flush."""
        self._rows[table].append(row)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Writes root attributes that are known only later (the clock's offset, say)."""
        _set_attributes(self._file, attributes)

    def flush(self) -> None:
        """Appends the kept rows and hands them to the operating system."""
        for name, rows in self._rows.items():
            if rows:
                table, start = self._tables[name], len(self._tables[name])
                table.resize((start + len(rows),))
                table[start:] = np.array(rows, DTYPES[name])
                rows.clear()
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        if self._file:
            self.flush()
            self._file.close()


def part_path(folder: Path, rank: int) -> Path:
    """Gives the path of a rank's part below the run folder."""
    return folder / "trace" / f"rank{rank:04d}.h5"


def read_part(path: Path) -> Trace:
    """Reads one rank's part, on its own clock; also that of a run that was killed.

    Raises:
        ConfigError: the file is missing, unreadable, or of a newer schema.
    """
    with _open(path) as file:
        _check_version(path, file)
        tables: dict[str, Any] = {name: file[name][()] for name in PART_TABLES}
        return Trace(attributes=_get_attributes(file), **tables)


def merge_parts(paths: Sequence[Path], attributes: Mapping[str, Any]) -> Trace:
    """Joins parts on rank 0's clock, events sorted by (rank, start_ns); `attributes` are added to the root.

    A step counts as done when every rank has it; later rows of a rank that got further stay in `rank_steps`.
    """
    parts = [read_part(path) for path in paths]
    if not parts:
        raise ConfigError("trace", "no parts", "at least one rank's part is needed")
    parts.sort(key=lambda part: int(part.attributes["rank"]))
    world_size = int(parts[0].attributes["world_size"])
    for part in parts:
        shift = int(part.attributes.get("clock_offset_ns", 0))
        for table in (part.events, part.rank_steps, part.samples):
            for column in set(_TIMES) & set(table.dtype.names or ()):
                table[column] -= shift
    tables: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in PART_TABLES
    }
    events = tables["events"]
    tables["events"] = events[np.lexsort((events["start_ns"], events["rank"]))]
    merged = {
        **parts[0].attributes,
        "hostnames": _by_rank(parts, world_size, "hostname", ""),
        "clock_offset_ns": _by_rank(parts, world_size, "clock_offset_ns", 0),
        "clock_error_ns": _by_rank(parts, world_size, "clock_error_ns", 0),
        **attributes,
    }
    for gone in ("rank", "hostname"):
        merged.pop(gone, None)
    return Trace(attributes=merged, steps=_whole_steps(tables["rank_steps"], world_size), **tables)


def _by_rank(parts: Sequence[Trace], world_size: int, name: str, unknown: Any) -> list[Any]:
    """Gives an attribute of every rank; `unknown` for a rank whose part is missing."""
    known = {int(part.attributes["rank"]): part.attributes.get(name, unknown) for part in parts}
    return [known.get(rank, unknown) for rank in range(world_size)]


def _whole_steps(rank_steps: np.ndarray, world_size: int) -> np.ndarray:
    rows = []
    for step in np.unique(rank_steps["step"]):
        mine = rank_steps[rank_steps["step"] == step]
        if len(mine) < world_size:
            continue
        known = mine["loss"][~np.isnan(mine["loss"])]
        loss = float(known[0]) if len(known) else float("nan")
        rows.append(
            (
                step,
                mine["start_ns"].min(),
                mine["end_ns"].max(),
                mine["images"].max(),
                loss,
                mine["is_warmup"].max(),
            )
        )
    return np.array(rows, DTYPES["steps"])


def write_trace(path: Path, trace: Trace) -> None:
    """Writes a whole trace, each column with its `units` and `long_name`; the file appears complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(partial, "w") as file:
        _set_attributes(file, {**trace.attributes, "schema_version": SCHEMA_VERSION})
        for name, columns in COLUMNS.items():
            group = file.create_group(name)
            table = getattr(trace, name)
            for column, _, units, long_name in columns:
                compress = (
                    {"compression": "gzip", "compression_opts": 1, "shuffle": True} if len(table) else {}
                )
                dataset = group.create_dataset(column, data=np.ascontiguousarray(table[column]), **compress)
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
                file.create_dataset("partition/boundaries", data=np.array(trace.boundaries, dtype="i8")),
                "first layer of each stage, and the number of layers",
            ),
        ):
            dataset.attrs["units"], dataset.attrs["long_name"] = "1", long_name
    partial.replace(path)


def read_trace(path: Path) -> Trace:
    """Reads a whole trace.

    Raises:
        ConfigError: the file is missing, unreadable, or of a newer major schema.
    """
    with _open(path) as file:
        _check_version(path, file)
        tables: dict[str, Any] = {}
        for name, columns in COLUMNS.items():
            table = np.empty(len(file[name][columns[0][0]]), DTYPES[name])
            for column, *_ in columns:
                table[column] = file[name][column][()]
            tables[name] = table
        return Trace(
            attributes=_get_attributes(file),
            run_yaml=file["run_yaml"].asstr()[()],
            schedule_rows=tuple(file["schedule/rows"].asstr()[()]),
            schedule_sha256=str(file["schedule"].attrs["sha256"]),
            boundaries=tuple(int(b) for b in file["partition/boundaries"][()]),
            **tables,
        )


@contextlib.contextmanager
def _open(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
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
            "trace",
            path,
            f"schema {version} cannot be read here (known: {SCHEMA_VERSION})",
            "update this toolkit",
        )


def _set_attributes(file: h5py.File, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
            file.attrs[name] = np.array(value, dtype=h5py.string_dtype())
        else:
            file.attrs[name] = value


def _get_attributes(file: h5py.File) -> dict[str, Any]:
    return {name: _plain(value) for name, value in file.attrs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value

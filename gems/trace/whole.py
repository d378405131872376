"""A whole trace: the file that a finished or simulated run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gems.errors import ConfigError
from gems.trace.hdf5 import get_attributes, open_trace, set_attributes
from gems.trace.layout import COLUMNS, DEFAULTS, DTYPES, KINDS, SCHEMA_VERSION, STREAMS, LayerTimes, Trace
from gems.trace.part import merge_parts, part_path
from gems.utils.atomic_io import atomic_write


def write_trace(path: Path, trace: Trace) -> None:
    """Write a whole trace, each column with its `units` and `long_name`; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial, h5py.File(partial, "w") as file:
        set_attributes(file, {**trace.attributes, "schema_version": SCHEMA_VERSION})
        for name, columns in COLUMNS.items():
            group = file.create_group(name)
            table = getattr(trace, name)
            for column, _, units, long_name in columns:
                compress = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if len(table) else {}
                dataset = group.create_dataset(column, data=np.ascontiguousarray(table[column]), **compress)
                dataset.attrs["units"], dataset.attrs["long_name"] = units, long_name
        file["events"].attrs["kinds"] = list(KINDS)
        file["events"].attrs["streams"] = list(STREAMS)
        text = h5py.string_dtype()
        schedule = file.create_group("schedule")
        schedule.attrs["sha256"] = trace.schedule_sha256
        rows = np.array(trace.schedule_rows, dtype=object)
        for dataset, long_name in (
            (file.create_dataset("run_yaml", data=trace.run_yaml, dtype=text), "resolved configuration, YAML"),
            (schedule.create_dataset("rows", data=rows, dtype=text), "actions of each rank of a pipeline, in order"),
            (
                file.create_dataset("memory_plan", data=trace.memory_plan, dtype=text),
                "segments of each stage and their policies, JSON; empty where activations are kept",
            ),
            (
                file.create_dataset("partition/boundaries", data=np.array(trace.boundaries, dtype="i8")),
                "first layer of each stage, and the number of layers",
            ),
        ):
            dataset.attrs["units"], dataset.attrs["long_name"] = "1", long_name


def read_column(file: h5py.File, table: str, column: str) -> Any:
    """Read a column of an open trace, or what it stands for in an older one that lacks it.

    Raises:
        KeyError: the trace has no such column, and never had to.
    """
    default = DEFAULTS.get((table, column))
    if default is not None and column not in file[table]:
        return default
    return file[table][column][()]


def _layer_times(file: h5py.File) -> LayerTimes | None:
    """Read what the profile in a trace says of the layers' times; None without a profile."""
    if "profile" not in file:
        return None
    group = file["profile"]
    columns = (tuple(map(float, group[name][()])) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    return LayerTimes(str(group.attrs["source"]), *columns)


def read_trace(path: Path) -> Trace:
    """Read a whole trace.

    Raises:
        ConfigError: the file is missing, unreadable, or of a newer major schema.
    """
    with open_trace(path) as file:
        tables: dict[str, Any] = {}
        for name, columns in COLUMNS.items():
            table = np.empty(len(file[name][columns[0][0]]), DTYPES[name])
            for column, *_ in columns:
                table[column] = read_column(file, name, column)
            tables[name] = table
        return Trace(
            attributes=get_attributes(file),
            run_yaml=file["run_yaml"].asstr()[()],
            schedule_rows=tuple(file["schedule/rows"].asstr()[()]),
            schedule_sha256=str(file["schedule"].attrs["sha256"]),
            boundaries=tuple(int(b) for b in file["partition/boundaries"][()]),
            memory_plan=file["memory_plan"].asstr()[()] if "memory_plan" in file else "",
            layer_times=_layer_times(file),
            **tables,
        )


def load_trace(path: Path | str) -> Trace:
    """Read the trace of a run folder, or a trace file.

    Of a run without a `trace.h5` yet, the ranks' parts are joined: their events, steps and samples, without the
    schedule and the configuration, which are in the folder's own files.

    Raises:
        ConfigError: nothing there that can be read, or a newer major schema.
    """
    path = Path(path)
    whole = path / "trace.h5"
    if not path.is_dir() or whole.exists():
        return read_trace(whole if path.is_dir() else path)
    parts = sorted(part_path(path, 0).parent.glob("rank*.h5"))
    if not parts:
        raise ConfigError(
            "trace", path, "holds neither trace.h5 nor trace/rank*.h5", "give a run folder or a trace file"
        )
    return merge_parts(parts, {})

"""A part: one rank's rows while the run goes on, and how the parts of all ranks become one trace.

The rows stand in compound tables: one write a step instead of thirteen. With the default libver and a flush at each
step's end the file is readable after SIGKILL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gems.errors import ConfigError
from gems.trace.hdf5 import get_attributes, open_trace, set_attributes
from gems.trace.layout import DTYPES, Trace

PART_TABLES = ("events", "rank_steps", "samples")
_TIMES = ("start_ns", "end_ns", "t_ns")


class TracePart:
    """One rank's part of a trace while the run goes on. Rows are kept until `flush`, at step ends."""

    def __init__(self, path: Path, rank: int, attributes: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self._file = h5py.File(path, "w")
        set_attributes(self._file, {**attributes, "rank": rank})
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in PART_TABLES}
        self._tables = {
            name: self._file.create_dataset(name, (0,), DTYPES[name], maxshape=(None,), chunks=(1024,))
            for name in PART_TABLES
        }
        self._file.flush()

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        """Keep one row (all columns of `COLUMNS[table]`, in order) for the next flush."""
        self._rows[table].append(row)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Write root attributes that are known only later (the clock's offset, say)."""
        set_attributes(self._file, attributes)

    def flush(self) -> None:
        """Append the kept rows and hands them to the operating system."""
        for name, rows in self._rows.items():
            if rows:
                table, start = self._tables[name], len(self._tables[name])
                table.resize((start + len(rows),))
                table[start:] = np.array(rows, DTYPES[name])
                rows.clear()
        self._file.flush()

    def close(self) -> None:
        """Flush and closes the file."""
        if self._file:
            self.flush()
            self._file.close()


def part_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's part below the run folder."""
    return folder / "trace" / f"rank{rank:04d}.h5"


def read_part(path: Path) -> Trace:
    """Read one rank's part, on its own clock; also that of a run that was killed.

    Raises:
        ConfigError: the file is missing, unreadable, or of a newer schema.
    """
    with open_trace(path) as file:
        tables: dict[str, Any] = {name: file[name][()] for name in PART_TABLES}
        return Trace(attributes=get_attributes(file), **tables)


def merge_parts(paths: Sequence[Path], attributes: Mapping[str, Any]) -> Trace:
    """Join parts on rank 0's clock, events sorted by (rank, start_ns); `attributes` are added to the root.

    A step counts as done when every rank has it; later rows of a rank that got further stay in `rank_steps`.
    """
    parts = [read_part(path) for path in paths]
    if not parts:
        raise ConfigError("trace", "no parts", "at least one rank's part is needed")
    parts.sort(key=lambda part: int(part.attributes["rank"]))
    world_size = int(parts[0].attributes["world_size"])
    for part in parts:
        for table in (part.events, part.rank_steps, part.samples):
            for column in set(_TIMES) & set(table.dtype.names or ()):
                table[column] -= _offset_ns(part.attributes, table[column])
    tables: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in PART_TABLES}
    events = tables["events"]
    tables["events"] = events[np.lexsort((events["start_ns"], events["rank"]))]
    merged = {
        **parts[0].attributes,
        "hostnames": _by_rank(parts, world_size, "hostname", ""),
        "clock_offset_ns": _by_rank(parts, world_size, "clock_offset_ns", 0),
        "clock_error_ns": _by_rank(parts, world_size, "clock_error_ns", 0),
        **attributes,
    }
    for peak in ("peak_allocated_bytes", "peak_reserved_bytes"):
        if any(peak in part.attributes for part in parts):
            merged[peak] = _by_rank(parts, world_size, peak, -1)
    for gone in ("rank", "hostname", "clock_at_ns", "clock_end_offset_ns", "clock_end_error_ns", "clock_end_at_ns"):
        merged.pop(gone, None)
    return Trace(
        attributes=merged,
        steps=_whole_steps(tables["rank_steps"], world_size, int(parts[0].attributes.get("attempt", 1))),
        **tables,
    )


def _offset_ns(attributes: Mapping[str, Any], times_ns: np.ndarray) -> np.ndarray:
    """Return how far a rank's clock was ahead of rank 0's at some of its times.

    Between the measurement at the start and the one at the end (which a killed run lacks) clocks drift evenly.
    """
    start = int(attributes.get("clock_offset_ns", 0))
    end = int(attributes.get("clock_end_offset_ns", start))
    first, last = int(attributes.get("clock_at_ns", 0)), int(attributes.get("clock_end_at_ns", 0))
    share = np.clip((times_ns - first) / (last - first), 0.0, 1.0) if last > first else np.zeros(len(times_ns))
    offsets: np.ndarray = start + np.rint(share * (end - start)).astype(np.int64)
    return offsets


def _by_rank(parts: Sequence[Trace], world_size: int, name: str, unknown: Any) -> list[Any]:
    """Return an attribute of every rank; `unknown` for a rank whose part is missing."""
    known = {int(part.attributes["rank"]): part.attributes.get(name, unknown) for part in parts}
    return [known.get(rank, unknown) for rank in range(world_size)]


def _whole_steps(rank_steps: np.ndarray, world_size: int, attempt: int) -> np.ndarray:
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
                attempt,
            )
        )
    return np.array(rows, DTYPES["steps"])

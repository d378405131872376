"""Trace parts: the rows of one rank during the run.

The parts of all ranks, and of all attempts, are merged into one trace. Rows are stored in compound
tables, so a step needs one write instead of thirteen. With the default libver and a flush at the
end of each step, the file is readable after SIGKILL.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gems.errors import ConfigError
from gems.trace.hdf5 import get_attributes, open_trace, read_trace, set_attributes
from gems.trace.layout import DEFAULTS, DTYPES, LATER_TABLES, Trace

PART_TABLES = ("events", "rank_steps", "validations", "samples")
TABLES = ("events", "steps", "rank_steps", "validations", "samples")
GAP_NS = 1_000_000
CHUNK_ROWS = 1024
METADATA_BYTES = 1 << 14  # more than HDF5 adds for new chunks and attributes in one flush
# limit for each table while the disk is full
MAX_WAITING_ROWS = 200_000
CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_log = logging.getLogger(__name__)


class TracePart:
    """One rank's part of a trace during the run.

    Rows and attributes are buffered until `flush` at the end of a step. If the disk is full, they
    wait for a later flush, and the run goes on: a failed write breaks HDF5's file and may end the
    process, so HDF5 only gets what fits.
    """

    def __init__(self, path: Path, rank: int, attributes: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self._file = h5py.File(path, "w")
        self._attributes: dict[str, Any] = {**attributes, "rank": rank}
        self._num_rows = dict.fromkeys(PART_TABLES, 0)
        self._is_waiting = False
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in PART_TABLES}
        self._tables = {
            name: self._file.create_dataset(
                name, (0,), DTYPES[name], maxshape=(None,), chunks=(CHUNK_ROWS,)
            )
            for name in PART_TABLES
        }
        self.flush()

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        """Buffer one row (all columns of `COLUMNS[table]`, in order) for the next flush."""
        self._rows[table].append(row)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Buffer root attributes that become known later, such as the clock's offset."""
        self._attributes.update(attributes)

    def flush(self) -> None:
        """Append the buffered rows and pass them to the operating system, if the disk has room."""
        try:
            is_allocated = self._allocate()
            for name, rows in self._rows.items():
                if rows:
                    start = self._num_rows[name]
                    end = self._num_rows[name] + len(rows)
                    self._tables[name].resize((end,))
                    self._tables[name][start:] = np.array(rows, DTYPES[name])
                    self._num_rows[name] = end
                    rows.clear()
            set_attributes(self._file, self._attributes)
            self._attributes.clear()
            self._file.flush()
            if is_allocated:
                os.ftruncate(self._file.id.get_vfd_handle(), self._file.id.get_filesize())
            self._is_waiting = False
        except OSError as error:
            if not self._is_waiting:
                _log.warning(
                    "%s waits in memory for the disk: %s",
                    self._file.filename,
                    os.strerror(error.errno or 0),
                )
            self._is_waiting = True
            for rows in self._rows.values():
                del rows[MAX_WAITING_ROWS:]

    def close(self) -> None:
        """Flush and close the file; rows that still do not fit are lost."""
        if self._file:
            self.flush()
            if self._is_waiting:
                _log.warning(
                    "%s lacks %d rows", self._file.filename, sum(map(len, self._rows.values()))
                )
            self._file.close()

    def _allocate(self) -> bool:
        """Allocate space for the next flush, and return whether any was needed.

        Raises:
            OSError: The disk is full.
        """
        num_bytes = METADATA_BYTES if self._attributes else 0
        for name, rows in self._rows.items():
            before, after = (
                -(-count // CHUNK_ROWS)
                for count in (self._num_rows[name], self._num_rows[name] + len(rows))
            )
            num_bytes += (after - before) * (DTYPES[name].itemsize * CHUNK_ROWS + METADATA_BYTES)
        if num_bytes:
            try:
                os.posix_fallocate(
                    self._file.id.get_vfd_handle(), self._file.id.get_filesize(), num_bytes
                )
            except OSError as error:
                if error.errno not in CANNOT_ALLOCATE:
                    raise
        return num_bytes > 0


def part_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's part in the run folder."""
    return folder / "trace" / f"rank{rank:04d}.h5"


def read_part(path: Path) -> Trace:
    """Read one rank's part, on its own clock, even if its run was killed.

    Raises:
        ConfigError: The file is missing, unreadable, or of a newer schema.
    """
    with open_trace(path) as file:
        tables: dict[str, Any] = {
            name: (
                np.empty(0, DTYPES[name])
                if name in LATER_TABLES and name not in file
                else _with_all_columns(name, file[name][()])
            )
            for name in PART_TABLES
        }
        return Trace(attributes=get_attributes(file), **tables)


def _with_all_columns(name: str, table: np.ndarray) -> np.ndarray:
    """Return a table with defaults for the columns that an older minor version lacks."""
    if table.dtype == DTYPES[name]:
        return table
    whole = np.empty(len(table), DTYPES[name])
    for column in DTYPES[name].names or ():
        whole[column] = (
            table[column] if column in (table.dtype.names or ()) else DEFAULTS[name, column]
        )
    return whole


def merge_parts(paths: Sequence[Path], attributes: Mapping[str, Any]) -> Trace:
    """Merge parts on rank 0's clock, with events sorted by (rank, start_ns).

    `attributes` are added to the root. A step is complete once every rank has finished it; later
    rows of a rank that is ahead stay in `rank_steps`.
    """
    parts = sorted(map(read_part, paths), key=lambda part: int(part.attributes["rank"]))
    if not parts:
        raise ConfigError("trace", "no parts", "at least one rank's part is needed")
    world_size = int(parts[0].attributes["world_size"])
    for part in parts:
        for table in (part.events, part.rank_steps, part.samples):
            for column in _times(table):
                table[column] -= _offset_ns(part.attributes, table[column])
    tables = _joined(PART_TABLES, parts)

    def by_rank(name: str, unknown: Any) -> list[Any]:
        known = {int(part.attributes["rank"]): part.attributes.get(name, unknown) for part in parts}
        return [known.get(rank, unknown) for rank in range(world_size)]

    unknown: dict[str, Any] = {"hostname": "", "clock_offset_ns": 0, "clock_error_ns": 0}
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes")
    unknown |= {peak: -1 for peak in peaks if any(peak in part.attributes for part in parts)}
    merged = parts[0].attributes | {name: by_rank(name, value) for name, value in unknown.items()}
    merged = {**merged, "hostnames": merged["hostname"], **attributes}
    for name in (
        "rank",
        "hostname",
        "clock_at_ns",
        "clock_end_offset_ns",
        "clock_end_error_ns",
        "clock_end_at_ns",
    ):
        merged.pop(name, None)
    attempt = int(parts[0].attributes.get("attempt", 1))
    return Trace(merged, steps=_whole_steps(tables["rank_steps"], world_size, attempt), **tables)


def _times(table: np.ndarray) -> list[str]:
    return [name for name in table.dtype.names or () if name.endswith("_ns")]


def _joined(names: Sequence[str], traces: Sequence[Trace]) -> dict[str, Any]:
    """Concatenate the tables of several traces, with events sorted by (rank, start_ns)."""
    tables = {name: np.concatenate([getattr(trace, name) for trace in traces]) for name in names}
    events = tables["events"]
    return tables | {"events": events[np.lexsort((events["start_ns"], events["rank"]))]}


def _offset_ns(attributes: Mapping[str, Any], times_ns: np.ndarray) -> np.ndarray:
    """Return by how much a rank's clock was ahead of rank 0's at the given times.

    The drift between the measurement at the start and the one at the end is taken as linear. A
    killed run has no measurement at the end.
    """
    start = int(attributes.get("clock_offset_ns", 0))
    end = int(attributes.get("clock_end_offset_ns", start))
    first = int(attributes.get("clock_at_ns", 0))
    last = int(attributes.get("clock_end_at_ns", 0))
    share = (
        np.clip((times_ns - first) / (last - first), 0.0, 1.0)
        if last > first
        else np.zeros(len(times_ns))
    )
    offsets: np.ndarray = start + np.rint(share * (end - start)).astype(np.int64)
    return offsets


def _whole_steps(rank_steps: np.ndarray, world_size: int, attempt: int) -> np.ndarray:
    rows = []
    for step in np.unique(rank_steps["step"]):
        ranks = rank_steps[rank_steps["step"] == step]
        if len(ranks) == world_size:
            losses = ranks["loss"][~np.isnan(ranks["loss"])]
            rows.append(
                (
                    step,
                    ranks["start_ns"].min(),
                    ranks["end_ns"].max(),
                    ranks["images"].max(),
                    losses[0] if len(losses) else float("nan"),
                    ranks["is_warmup"].max(),
                    attempt,
                    ranks["grad_norm"][0],
                    ranks["learning_rate"].max(),
                )
            )
    return np.array(rows, DTYPES["steps"])


def load_trace(path: Path | str) -> Trace:
    """Read the trace of a run folder, or a trace file.

    If the run has no `trace.h5` yet, merge the parts of its ranks: events, steps and samples. The
    schedule and the configuration are then missing; they are in files of their own in the folder.

    Raises:
        ConfigError: There is no readable trace, or its major schema is newer.
    """
    path = Path(path)
    whole = path / "trace.h5"
    if not path.is_dir() or whole.exists():
        return read_trace(whole if path.is_dir() else path)
    parts = sorted(part_path(path, 0).parent.glob("rank*.h5"))
    if not parts:
        raise ConfigError(
            "trace",
            path,
            "holds neither trace.h5 nor trace/rank*.h5",
            "give a run folder or a trace file",
        )
    return merge_parts(parts, {})


def join_attempts(traces: Sequence[Trace]) -> Trace:
    """Join the traces of attempts, given in order, on the clock of the first one that counts.

    An attempt that resumed from a checkpoint continues the steps of the attempts before it. Steps
    that it repeats are left out of the earlier attempts, because their work was lost; so each step
    is present once. An attempt that began at the first step, or from the state of another run, has
    no predecessor. The clocks of different nodes are unrelated, so an attempt is placed by the time
    of day at its beginning, at least GAP_NS after the one before. The root attributes are those of
    the last attempt.
    """
    start = len(traces) - 1
    while start and traces[start].attributes.get("continues"):
        start -= 1
    chain = traces[start:]
    if len(chain) == 1:
        return chain[0]

    def first_step(trace: Trace) -> int:
        return int(trace.attributes.get("first_step", 0))

    def zero_ns(trace: Trace) -> int:
        """Return the time of day at which the attempt's clock was zero, in ns."""
        return int(trace.attributes.get("utc_ns", 0)) - int(trace.attributes.get("utc_at_ns", 0))

    moved: list[Trace] = []
    shifts_ns: list[int] = []
    free_ns: int | None = None  # no earlier attempt has an event from here on
    for number, trace in enumerate(chain):
        tables = {name: getattr(trace, name).copy() for name in TABLES}
        filled = [table for table in tables.values() if len(table) and _times(table)]
        shift_ns = zero_ns(trace) - zero_ns(chain[0])
        if filled:
            if free_ns is not None:
                shift_ns = max(
                    shift_ns, free_ns - min(int(table[_times(table)[0]].min()) for table in filled)
                )
            free_ns = (
                max(int(table[_times(table)[-1]].max()) for table in filled) + shift_ns + GAP_NS
            )
        shifts_ns.append(shift_ns)
        repeated = min(map(first_step, chain[number + 1 :]), default=None)
        for name, table in tables.items():
            for column in _times(table):
                table[column] += shift_ns
            if repeated is not None and "step" in (table.dtype.names or ()):
                # the step of a validation is the number of steps done before it
                done = int(name == "validations")
                tables[name] = table[table["step"] < repeated + done]
        moved.append(Trace({}, **tables))
    attributes = chain[-1].attributes | {
        "first_step": first_step(chain[0]),
        "attempts": [int(trace.attributes.get("attempt", 1)) for trace in chain],
        "attempt_shifts_ns": shifts_ns,
    }
    return Trace(attributes, run_yaml=chain[-1].run_yaml, **_joined(TABLES, moved))

"""Traces: one HDF5 layout for measured, emulated and simulated runs.

A finished run has one file, with one group of columns for each of `/events`, `/steps`,
`/rank_steps`, `/validations` and `/samples`. During the run, each rank writes its own part.
"""

from gems.trace.hdf5 import open_trace, read_column, read_trace, write_trace
from gems.trace.layout import (
    COLUMNS,
    DTYPES,
    KINDS,
    PREDECESSORS,
    SCHEMA_VERSION,
    SOURCES,
    STREAMS,
    TIME_UNIT,
    LayerTimes,
    Trace,
    root_attributes,
)
from gems.trace.parts import TracePart, join_attempts, merge_parts, part_path, read_part

__all__ = [
    "COLUMNS",
    "DTYPES",
    "KINDS",
    "PREDECESSORS",
    "SCHEMA_VERSION",
    "SOURCES",
    "STREAMS",
    "TIME_UNIT",
    "LayerTimes",
    "Trace",
    "TracePart",
    "join_attempts",
    "merge_parts",
    "open_trace",
    "part_path",
    "read_column",
    "read_part",
    "read_trace",
    "root_attributes",
    "write_trace",
]

"""The trace layout: tables, their columns with units, and a trace in memory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gems.utils.units import now_utc

if TYPE_CHECKING:
    from gems.schedule.schedule import Schedule

# root attribute of simulated runs whose seconds are abstract units
TIME_UNIT = "time_unit"
# root attribute of a run of a graph of stages: the stages that each reads, JSON
PREDECESSORS = "predecessors"
SCHEMA_VERSION = "1.3"
SOURCES = ("measured", "emulated", "simulated")
# The kinds of actions, followed by what a rank does outside its list of actions: INPUT is the wait
# for the data of a step or micro-batch.
KINDS = (
    "F",
    "B",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "REDUCE_GRAD",
    "STEP",
    "I",
    "W",
    "R",
    "OFFLOAD",
    "PREFETCH",
    "FREE",
    "AWAIT",
    "INPUT",
    "START_REDUCE",
)
STREAMS = ("compute", "link", "copy_out", "copy_in")
_STEP = ("step", "i4", "1", "optimizer step")
_RANK = ("rank", "i4", "1", "world rank")
_IMAGES = ("images", "i8", "1", "images of all directions and replicas")
_IS_WARMUP = ("is_warmup", "i1", "1", "1 for a step left out of figures")
_RECIPE = (
    (
        "grad_norm",
        "f8",
        "1",
        "norm of the gradient over all stages, before clipping; NaN if nothing needs it",
    ),
    (
        "learning_rate",
        "f8",
        "1",
        "largest learning rate of the parameter groups; NaN if nothing is trained",
    ),
)

COLUMNS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "events": (
        _RANK,
        _STEP,
        ("kind", "i2", "1", "action kind, index into the attribute kinds"),
        ("stage", "i4", "1", "stage, -1 for none"),
        ("segment", "i4", "1", "segment of the stage, -1 for the whole"),
        ("direction", "i1", "1", "0 down, 1 up"),
        ("micro_batch", "i4", "1", "micro-batch of the step, -1 for none"),
        ("stream", "i1", "1", "stream, index into the attribute streams"),
        ("start_ns", "i8", "ns", "begin on rank 0's clock; of a transfer, its posting"),
        (
            "end_ns",
            "i8",
            "ns",
            "end on rank 0's clock; of a transfer, the time it was seen complete",
        ),
        ("moved_bytes", "i8", "byte", "bytes carried"),
        ("device_bytes", "i8", "byte", "bytes held on the device when the action ended"),
        ("host_bytes", "i8", "byte", "bytes held in host memory when the action ended"),
    ),
    "steps": (
        _STEP,
        ("start_ns", "i8", "ns", "first rank's begin"),
        ("end_ns", "i8", "ns", "last rank's end"),
        _IMAGES,
        ("loss", "f8", "1", "mean training loss over all images of the step"),
        _IS_WARMUP,
        ("attempt", "i4", "1", "attempt that ran the step, from 1"),
        *_RECIPE,
    ),
    "rank_steps": (
        _RANK,
        _STEP,
        ("start_ns", "i8", "ns", "begin on this rank"),
        ("end_ns", "i8", "ns", "end on this rank"),
        _IMAGES,
        (
            "loss",
            "f8",
            "1",
            "mean training loss of the step, where this rank knows it; NaN elsewhere",
        ),
        _IS_WARMUP,
        *_RECIPE,
    ),
    "validations": (
        ("step", "i4", "1", "optimizer steps done"),
        ("metric", "i2", "1", "metric, index into the root attribute metrics"),
        ("value", "f8", "1", "its value on the validation split"),
    ),
    "samples": (
        _RANK,
        ("t_ns", "i8", "ns", "time on rank 0's clock"),
        (
            "device_bytes",
            "i8",
            "byte",
            "device memory in use as the driver reports it, -1 without a GPU",
        ),
        ("rss_bytes", "i8", "byte", "resident memory of the process"),
        ("power_w", "f8", "W", "power draw of the device, NaN without a GPU"),
        ("utilisation", "f8", "1", "share of time in which the device computed, NaN without a GPU"),
    ),
}
# defaults of columns that files of an earlier minor version lack
DEFAULTS: dict[tuple[str, str], float] = {
    ("steps", "attempt"): 1,
    **{(table, column): math.nan for table in ("steps", "rank_steps") for column, *_ in _RECIPE},
}
LATER_TABLES = ("validations",)  # files of an earlier minor version lack these
DTYPES = {
    name: np.dtype([(column, kind) for column, kind, _, _ in columns])
    for name, columns in COLUMNS.items()
}


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The profiled times of each layer for one micro-batch, in seconds, and their source."""

    source: str
    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]


_EMPTY = {name: partial(np.empty, 0, dtype) for name, dtype in DTYPES.items()}


@dataclass(slots=True)
class Trace:
    """A trace in memory: the tables of `COLUMNS` as structured arrays, root attributes and texts.

    `memory_plan` is JSON: the policy for each activation and its predicted cost. It is empty if all
    activations were kept. `layer_times` is None if the file has no profile.
    """

    attributes: dict[str, Any]
    events: np.ndarray = field(default_factory=_EMPTY["events"])
    steps: np.ndarray = field(default_factory=_EMPTY["steps"])
    rank_steps: np.ndarray = field(default_factory=_EMPTY["rank_steps"])
    validations: np.ndarray = field(default_factory=_EMPTY["validations"])
    samples: np.ndarray = field(default_factory=_EMPTY["samples"])
    run_yaml: str = ""
    schedule_rows: tuple[str, ...] = ()
    schedule_sha256: str = ""
    boundaries: tuple[int, ...] = ()
    memory_plan: str = ""
    layer_times: LayerTimes | None = None

    def record(self, schedule: Schedule) -> None:
        """Store a pipeline's schedule, and the predecessors of each stage unless it is a chain."""
        self.schedule_rows = tuple(" ".join(map(str, row)) for row in schedule.rank_schedules)
        self.schedule_sha256 = schedule.digest()
        if not schedule.placement.is_chain:
            self.attributes[PREDECESSORS] = json.dumps(schedule.placement.predecessors)

    @property
    def source(self) -> str:
        """The source of the trace: measured, emulated or simulated."""
        return str(self.attributes["source"])

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self.attributes["world_size"])


def root_attributes(source: str, signature: str, world_size: int, **more: Any) -> dict[str, Any]:
    """Return the root attributes that every trace has, plus `more`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source,
        "signature": signature,
        "world_size": world_size,
        "created_utc": now_utc(),
        **more,
    }

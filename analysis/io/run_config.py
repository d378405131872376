"""The configuration of a run, as stored in its trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from gems.config.fields import with_new_names
from gems.errors import ConfigError
from gems.schedule.registry import Terms, step_units
from gems.trace import DTYPES, Trace, open_trace, read_column
from gems.trace.hdf5 import get_attributes
from gems.utils.atomic_io import read_yaml
from gems.utils.units import counted

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of the resolved configuration; None if the trace does not contain it."""

    schedule: str | None = None
    partitions: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None
    parts: int | None = None
    chunks: int = 2
    cap: float | None = None
    strips: int = 1

    def describe_ranks(self, num_ranks: int) -> str:
        """Return a run's ranks with their partitions and replicas as text."""
        text = counted(num_ranks, "rank")
        if self.partitions and self.replicas:
            parts = counted(self.partitions, "partition")
            text += f" ({parts} x {counted(self.replicas, 'replica')})"
        return text

    def bubble(
        self, forward_s: float | None, backward_s: float | None, weight_grad_s: float | None = None
    ) -> float | None:
        """Return the schedule's bubble by its closed form.

        Return None if the closed form or a fact is unknown, or with strips. Times are those of a
        stage; `weight_grad_s` is W's part of a split backward.
        """
        name = self.schedule
        partitions = self.partitions
        micro_batches = self.micro_batches
        if self.strips > 1 or name is None or partitions is None or micro_batches is None:
            return None
        if forward_s is None or backward_s is None:
            return None
        w_s = backward_s / 2 if weight_grad_s is None else weight_grad_s
        times_s = forward_s, backward_s - w_s, w_s
        span_s = step_units(
            name, Terms(partitions, micro_batches, self.parts or 1, self.chunks, self.cap, *times_s)
        )
        return None if not span_s else 1.0 - micro_batches * (forward_s + backward_s) / span_s


def run_facts(trace: Trace) -> RunFacts:
    """Return the facts in `trace.run_yaml`, the resolved `gems.config.schema.RunSpec`.

    All are None for an empty text.

    Raises:
        ConfigError: The text is not YAML or not a mapping of groups, or it contains an invalid
            figure.
    """
    document = read_document(trace.run_yaml)
    schedule, parallel, cost = (_group(document, name) for name in ("schedule", "parallel", "cost"))
    name, cap, cap_bytes = (
        schedule.get(key) for key in ("name", "activation_cap", "activation_cap_bytes")
    )
    counts = {
        key: _count(parallel, key) for key in ("partitions", "replicas", "micro_batches", "parts")
    }
    unit_bytes = cost.get("activation_bytes")
    try:  # in units of activations
        units = (
            float(cap_bytes) / float(unit_bytes) if cap_bytes is not None and unit_bytes else cap
        )
        units = None if units is None else float(units)
    except (TypeError, ValueError) as error:
        raise ConfigError("run_yaml.schedule.activation_cap", cap, "allowed: a number") from error
    return RunFacts(
        None if name is None else str(name),
        **counts,
        chunks=_count(schedule, "chunks") or 2,
        cap=units,
        strips=_strips(parallel),
    )


def _strips(parallel: dict[str, Any]) -> int:
    """Return the number of strips of an image, or of blocks in so many rows and columns."""
    parts = parallel.get("strips")
    if isinstance(parts, list):
        return math.prod(_count({"strips": part}, "strips") or 1 for part in parts)
    return _count(parallel, "strips") or 1


def read_document(run_yaml: str) -> dict[str, Any]:
    """Return a run's configuration as groups of keys; it is empty for an empty text.

    Raises:
        ConfigError: The text is not YAML, or not a mapping of groups.
    """
    try:
        document = read_yaml(run_yaml) if run_yaml else {}
    except yaml.YAMLError as error:
        raise ConfigError(
            "run_yaml", "unreadable", f"not YAML ({' '.join(str(error).split())})"
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(
            "run_yaml", type(document).__name__, "allowed: a mapping of configuration groups"
        )
    return with_new_names(document)


def read_section(document: dict[str, Any], name: str, section: type[Section]) -> Section:
    """Read a group of a resolved configuration as its class.

    Keys that another version added are ignored.

    Raises:
        ConfigError: The group is not a mapping.
    """
    known: dict[str, Any] = getattr(section, "__dataclass_fields__", {})
    values = _group(document, name)
    return section(**{key: value for key, value in values.items() if key in known})


def read_head(path: Path) -> tuple[dict[str, Any], np.ndarray, dict[str, Any]]:
    """Return the root attributes, the rows of `/steps` and the configuration of a finished run.

    Events are not read, so that large traces take no time. Rows are sorted by step.

    Raises:
        ConfigError: The trace is missing, unreadable, or lacks its configuration.
    """
    file_path = path / "trace.h5" if path.is_dir() else path
    if not file_path.exists():
        raise ConfigError("path", path, "has no trace.h5", "give finished runs, or their trace.h5")
    with open_trace(file_path) as file:
        attributes = get_attributes(file)
        steps = np.empty(len(file["steps/step"]), DTYPES["steps"])
        for column in DTYPES["steps"].names or ():
            steps[column] = read_column(file, "steps", column)
        document = read_document(file["run_yaml"].asstr()[()])
    if not document:
        raise ConfigError(
            "trace", path, "holds no configuration of its run", "collect the run again"
        )
    return attributes, np.sort(steps, order="step"), document


def _group(document: dict[str, Any], name: str) -> dict[str, Any]:
    group = document.get(name) or {}
    if not isinstance(group, dict):
        raise ConfigError(f"run_yaml.{name}", group, "allowed: a mapping of keys")
    return group


def _count(group: dict[str, Any], name: str) -> int | None:
    value = group.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"run_yaml.parallel.{name}", value, "allowed: a whole number from 1")
    return value

"""What a trace says about its run: the facts of the configuration that figures need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from gems.errors import ConfigError
from gems.schedule.bounds import step_units
from gems.trace import Trace


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of the resolved configuration; None where the trace does not carry it."""

    schedule: str | None = None
    partitions: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None
    parts: int | None = None
    chunks: int = 2
    cap: float | None = None

    def bubble(
        self, forward_s: float | None, backward_s: float | None, weight_grad_s: float | None = None
    ) -> float | None:
        """Return the schedule's bubble by its closed form; None where that or a fact is not known.

        Times are those of a stage; `weight_grad_s` is W's part of the backward, where that is split.
        """
        name, partitions, micro_batches = self.schedule, self.partitions, self.micro_batches
        if name is None or partitions is None or micro_batches is None or forward_s is None or backward_s is None:
            return None
        span_s = step_units(
            name, partitions, micro_batches, forward_s, backward_s, self.parts or 1,
            weight_grad=weight_grad_s, chunks=self.chunks, cap=self.cap,
        )  # fmt: skip
        return None if not span_s else 1.0 - micro_batches * (forward_s + backward_s) / span_s


def facts_of(trace: Trace) -> RunFacts:
    """Return the facts in `trace.run_yaml`, the resolved `gems.config.schema.RunSpec`; all None for an empty text.

    Raises:
        ConfigError: the text is no YAML, no mapping of groups, or a count in it is not whole and positive.
    """
    try:
        document = yaml.safe_load(trace.run_yaml) if trace.run_yaml else {}
    except yaml.YAMLError as error:
        raise ConfigError("run_yaml", "unreadable", f"not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(document, dict):
        raise ConfigError("run_yaml", type(document).__name__, "allowed: a mapping of configuration groups")
    schedule = _group(document, "schedule").get("name")
    parallel = _group(document, "parallel")
    return RunFacts(
        schedule=None if schedule is None else str(schedule),
        partitions=_count(parallel, "partitions"),
        replicas=_count(parallel, "replicas"),
        micro_batches=_count(parallel, "micro_batches"),
        parts=_count(parallel, "parts"),
        chunks=_count(_group(document, "schedule"), "chunks") or 2,
        cap=_cap(_group(document, "schedule"), _group(document, "cost")),
    )


def _cap(schedule: dict[str, Any], cost: dict[str, Any]) -> float | None:
    """Return the cap in units of activations."""
    cap, cap_bytes, unit_bytes = (
        schedule.get("activation_cap"), schedule.get("activation_cap_bytes"), cost.get("activation_bytes"),
    )  # fmt: skip
    try:
        if cap_bytes is not None and unit_bytes:
            return float(cap_bytes) / float(unit_bytes)
        return None if cap is None else float(cap)
    except (TypeError, ValueError) as error:
        raise ConfigError("run_yaml.schedule.activation_cap", cap, "allowed: a number") from error


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

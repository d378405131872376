"""Checks of every value of a configuration by its kind: numbers that can be reckoned with, words that can be written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.schedule import FAMILIES

MAX_WHOLE = 2**63 - 1
# Products and quotients of a few numbers between these two stay finite.
MIN_REAL, MAX_REAL = 1e-30, 1e30
MAX_WORLD = 2**20
# F actions of a step: a schedule of so many is made and validated within minutes.
MAX_FORWARDS = 2**19
MAX_LAYERS = 10**5
MAX_SIDE = 2**20
MAX_MINUTES = 10**6
MOST = {
    "parallel.partitions": MAX_WORLD, "parallel.replicas": MAX_WORLD, "parallel.micro_batches": MAX_FORWARDS,
    "parallel.replications": MAX_FORWARDS, "parallel.parts": MAX_FORWARDS, "parallel.micro_batch_size": MAX_WORLD, "parallel.gpus": MAX_WORLD,
    "schedule.chunks": MAX_LAYERS, "schedule.max_stages": MAX_LAYERS,
    "model.depth": MAX_LAYERS, "model.width": MAX_SIDE, "model.vocabulary": 2**31 - 1,
    "data.height_px": MAX_SIDE, "data.width_px": MAX_SIDE, "data.channels": MAX_SIDE, "data.num_classes": 2**31 - 1,
    "data.length": MAX_SIDE, "data.train_samples": 2**31 - 1, "data.validation_samples": 2**31 - 1,
    "data.prefetch_steps": 10**4, "train.steps": 10**12, "train.warmup_steps": 10**12,
    "cluster.nodes": MAX_WORLD, "cluster.ranks_per_node": MAX_WORLD, "cluster.cpus_per_rank": 2**16,
    "cluster.gpus_per_node": 2**16, "cluster.usable_cpus_per_node": 2**20, "cluster.minutes": MAX_MINUTES,
    "machine.slow_rank": MAX_WORLD, "machine.threads_per_rank": 2**12, "machine.ranks_per_node": MAX_WORLD, "memory.segments": MAX_LAYERS,
    "profile.repetitions": 10**6,
}  # fmt: skip


def check_values(spec: RunSpec) -> None:
    """Check each number and word of the schema, alone or in a list.

    Raises:
        ConfigError: the first number that is negative, not finite, too small or too large to reckon with, or the first
            word that no file system, environment or terminal takes.
    """
    for key, value in _values_of("", spec):
        if isinstance(value, str):
            _check_word(key, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = MOST.get(key, MAX_WHOLE)
            if value < 0:
                raise ConfigError(key, value, "must be 0 or more")
            if value > most:
                raise ConfigError(key, value, f"must be at most {most}")
        elif isinstance(value, float):
            if not math.isfinite(value) or value < 0:
                raise ConfigError(key, value, "must be 0 or more and finite")
            if value and not MIN_REAL <= value <= MAX_REAL:
                raise ConfigError(key, value, f"must be 0 or from {MIN_REAL:g} to {MAX_REAL:g}")


def check_size(spec: RunSpec) -> None:
    """Check that the lists of a resolved run's step can be held in memory.

    Raises:
        ConfigError: more ranks, or more micro-batches on more stages.
    """
    parallel, family = spec.parallel, FAMILIES.get(spec.schedule.name)
    if spec.world_size > MAX_WORLD:
        raise ConfigError(
            "parallel.replicas", parallel.replicas,
            f"times parallel.partitions={parallel.partitions} must be at most {MAX_WORLD} ranks",
        )  # fmt: skip
    num_stages = parallel.partitions * (family.stages(spec.schedule.chunks) if family else 1)
    forwards = num_stages * (parallel.micro_batches or 1)
    if forwards > MAX_FORWARDS:
        raise ConfigError(
            "parallel.micro_batches", parallel.micro_batches,
            f"times {num_stages} stages is {forwards} forwards in a step, and there may be {MAX_FORWARDS}",
            "use fewer micro-batches, partitions or chunks",
        )  # fmt: skip


def _check_word(key: str, word: str) -> None:
    try:
        data = word.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(key, ascii(word), "is no text in UTF-8") from error
    if b"\0" in data:
        raise ConfigError(key, repr(word), "must not hold the character 0")


def _values_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values below `value` with their keys; of a user's own mapping the words alone."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _values_of(f"{key}.{field.name}" if key else field.name, getattr(value, field.name))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            if not (isinstance(entry, str | int | float) or is_dataclass(entry)):
                raise ConfigError(f"{key}[{number}]", entry, "must be one value")
            yield from _values_of(f"{key}[{number}]", entry)
    elif isinstance(value, dict):
        yield from ((f"{key}.{name}", entry) for name, entry in value.items() if isinstance(entry, str))
    else:
        yield key, value

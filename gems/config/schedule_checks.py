"""Checks of a schedule and of its pace against the rest of a run."""

from __future__ import annotations

import math

from gems.config.schema import RunSpec
from gems.errors import ConfigError, one_of
from gems.schedule import ACTIONS, PLACED, PLACEMENTS

PLAYED = ("emulated", "simulated")


def check_schedule(spec: RunSpec) -> None:
    """Check what a schedule asks for against the rest of the run.

    Raises:
        ConfigError: two keys that exclude each other, one that is missing, or an unknown word.
    """
    schedule, cost = spec.schedule, spec.cost
    cap, cap_bytes = schedule.activation_cap, schedule.activation_cap_bytes
    if cap is not None and cap_bytes is not None:
        raise ConfigError(
            "schedule.activation_cap",
            cap,
            f"stands beside schedule.activation_cap_bytes={cap_bytes}",
            "give one of them",
        )
    if cap_bytes is not None and not cost.activation_bytes and cost.name != "profile":
        raise ConfigError(
            "schedule.activation_cap_bytes", cap_bytes, "needs cost.activation_bytes, the bytes of one unit",
            "give it, use cost=profile, or give schedule.activation_cap in units",
        )  # fmt: skip
    if schedule.name == "capped" and cap is None and cap_bytes is None:
        raise ConfigError(
            "schedule.activation_cap", "null", "must be given for schedule=capped",
            "1 is what GEMS holds: one micro-batch on a rank's part of the model",
        )  # fmt: skip
    if schedule.name == "file" and not schedule.path:
        raise ConfigError(
            "schedule.path", "null", "must be given for schedule=file", "a file of `gems schedule --json`"
        )
    if schedule.name == PLACED:
        _check_placed(spec)
    for key, values, valid in (
        ("memory_actions", schedule.memory_actions, ACTIONS),
        ("placements", schedule.placements, PLACEMENTS),
    ):
        for value in values:
            if value not in valid:
                raise ConfigError(f"schedule.{key}", value, one_of(valid))
    for key, weights in (("cost.times", cost.times), ("cost.activations", cost.activations)):
        if not weights or any(not math.isfinite(weight) or weight <= 0 for weight in weights):
            raise ConfigError(key, weights, "must be one or more numbers above 0")


def _check_placed(spec: RunSpec) -> None:
    """Check what stands beside schedule=placed, which lays operators and not stages on ranks."""
    for key, value, usual in (
        ("parallel.boundaries", spec.parallel.boundaries, None),
        ("schedule.activation_cap", spec.schedule.activation_cap, None),
        ("schedule.activation_cap_bytes", spec.schedule.activation_cap_bytes, None),
        ("memory", spec.memory.name, "keep"),
        ("cost", spec.cost.name, "uniform"),
    ):
        if value != usual:
            raise ConfigError(
                key, value, "is for schedules of stages, and schedule=placed lays operators on ranks", "leave it out"
            )
    if spec.parallel.partitions < 2:
        raise ConfigError("parallel.partitions", spec.parallel.partitions, "must be 2 or more for schedule=placed")


def check_pace(spec: RunSpec) -> None:
    """Check the slow rank and the inputs that an emulated or simulated machine may be given.

    Raises:
        ConfigError: a rank that is not there, a slowdown that speeds up or has no rank, or any of them on a real machine.
    """
    machine, cost = spec.machine, spec.cost
    for key, value, default in (
        ("machine.slow_rank", machine.slow_rank, None),
        ("machine.slowdown", machine.slowdown, 1.0),
        ("cost.input_load", cost.input_load, 0.0),
    ):
        if value != default and machine.kind not in PLAYED:
            raise ConfigError(
                key, value, f"is for a machine without devices, and machine.kind={machine.kind} has its own times",
                "use machine=emulated or machine=simulated",
            )  # fmt: skip
    if machine.slowdown < 1:
        raise ConfigError("machine.slowdown", machine.slowdown, "must be 1 or more: how many times longer")
    if machine.slow_rank is None and machine.slowdown != 1:
        raise ConfigError("machine.slowdown", machine.slowdown, "needs machine.slow_rank, the rank that is slow")
    if machine.slow_rank is not None and machine.slow_rank >= spec.world_size:
        raise ConfigError(
            "machine.slow_rank", machine.slow_rank, f"must be below the world size, {spec.world_size} ranks"
        )

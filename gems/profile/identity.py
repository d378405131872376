"""What a profile is of: the run's model, data, dtype and device as plain data, and the versions that took it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import gems
from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.models.imported.describe import source_of

PROFILER = 7  # another number for profilers that would give other figures
DISTRIBUTIONS = ("torch", "numpy")
_UNSEEN = ("name", "path", "field_of_view_px", "train_samples", "validation_samples", "augment", "prefetch_steps")


def versions() -> dict[str, str]:
    """Return the versions that a profile depends on, without importing what they are of."""
    found = {"gems": gems.__version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def subject(model: ModelConfig, data: DataConfig, micro_batch_size: int, dtype: str) -> dict[str, Any]:
    """Return the model, and of the data and the run all that its layers see, by the keys of the configuration."""
    seen = {key: value for key, value in asdict(data).items() if key not in _UNSEEN}
    code = {"code of model.target": source_of(model.target, model.path)} if model.target is not None else {}
    return {
        **code,
        **{f"model.{key}": value for key, value in asdict(model).items()},
        **{f"data.{key}": value for key, value in seen.items()},
        "parallel.micro_batch_size": micro_batch_size,
        "train.dtype": dtype,
    }


def subject_of(spec: RunSpec) -> dict[str, Any]:
    """Return the subject of a resolved run's profile."""
    return subject(spec.model, spec.data, spec.parallel.micro_batch_size, spec.train.dtype)


def key_of(spec: RunSpec) -> dict[str, Any]:
    """Return everything that the profile of a resolved run depends on: subject, profiler, machine, versions."""
    machine, profile = spec.machine, spec.profile
    if profile.name == "fake" or (profile.name == "incremental" and profile.on == "fake"):
        where: dict[str, Any] = {
            "machine.name": machine.name,
            "machine.device": machine.device,
            "machine.float64_flops_per_s": machine.float64_flops_per_s,
            "machine.flops_per_s": machine.flops_per_s,
            "machine.bfloat16_flops_per_s": machine.bfloat16_flops_per_s,
            "machine.memory_bytes_per_s": machine.memory_bytes_per_s,
            "machine.efficiency": machine.efficiency,
            "profile.whole_model_peak": profile.whole_model_peak,
        }
    else:
        where = {
            "node": platform.node(),
            "machine.device": machine.device,
            "machine.threads_per_rank": machine.threads_per_rank,
            "profile.repetitions": profile.repetitions,
        }
    if profile.name == "incremental":
        where |= {
            "profile.on": profile.on,
            "machine.device_bytes": machine.device_bytes,
            "train.optimizer": spec.train.optimizer,
            "parallel.partitions": spec.parallel.partitions,
        }
    return {**subject_of(spec), **where, "profile": profile.name, "profiler": PROFILER, **versions()}


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each key in both whose values differ."""
    for key in wanted:
        if key in found and found[key] != wanted[key]:
            yield f"{key}={found[key]} instead of {wanted[key]}"

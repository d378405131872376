"""Keys and values that have new names: an old one is refused with the new name, and still read from a run.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gems.errors import ConfigError

RENAMED = {
    "cluster.ask_above_gpu_hours": "cluster.confirm_above_gpu_hours",
    "cluster.no_mem": "cluster.supports_mem_option",
    "cluster.points_per_job": "cluster.runs_per_job",
    "cluster.snapshot": "cluster.archive_code",
    "cluster.stop_before_s": "cluster.signal_before_end_s",
    "cost.input": "cost.input_load",
    "data.field_px": "data.field_of_view_px",
    "data.train_images": "data.train_samples",
    "data.validation_images": "data.validation_samples",
    "memory.least_bytes": "memory.min_offload_bytes",
    "memory.saving": "memory.target_reduction",
    "profile.whole": "profile.whole_model_peak",
    "schedule.allow": "schedule.memory_actions",
    "train.stall_limit_s": "train.hang_timeout_s",
}
VALUES = {("memory.recompute", "cheap"): "selective"}
INVERTED = ("cluster.no_mem",)  # true of the old key is false of the new one


def renamed_error(key: str, value: object) -> ConfigError | None:
    """Return the error for a key or a value that has a new name, or None."""
    if isinstance(value, str) and (key, value) in VALUES:
        return ConfigError(key, value, f"is now called {VALUES[key, value]}")
    if key not in RENAMED:
        return None
    return ConfigError(
        key, value, f"is now called {RENAMED[key]}", "true and false are swapped" if key in INVERTED else ""
    )


def with_new_names(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section of a run.yaml with old keys and values under their new names."""
    found = {}
    for name, value in values.items():
        old = f"{section}.{name}"
        value = VALUES.get((old, value), value) if isinstance(value, str) else value
        found[RENAMED[old].partition(".")[2] if old in RENAMED else name] = not value if old in INVERTED else value
    return found

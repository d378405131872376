"""A profile in a trace file: a group with a column for each field of its layers, each with its unit and long name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gems.profile.model_profile import SCHEMA, ModelProfile

COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("forward_s", "f8", "s", "forward of one micro-batch"),
    ("input_grad_s", "f8", "s", "input gradient of one micro-batch"),
    ("weight_grad_s", "f8", "s", "weight gradient of one micro-batch"),
    ("recompute_s", "f8", "s", "forward again, before backward"),
    ("param_bytes", "i8", "byte", "parameters"),
    ("buffer_bytes", "i8", "byte", "buffers, such as running statistics"),
    ("stash_bytes", "i8", "byte", "made and saved by the layer itself"),
    ("output_bytes", "i8", "byte", "tensors handed on"),
    ("output_grad_bytes", "i8", "byte", "gradients of the tensors handed on"),
    ("unsaved_input_bytes", "i8", "byte", "given and saved by no earlier layer"),
    ("workspace_bytes", "i8", "byte", "used and let go within the layer"),
    ("forward_peak_bytes", "i8", "byte", "most made at once in forward"),
    ("backward_peak_bytes", "i8", "byte", "most at once in backward"),
    ("held_for_weights_bytes", "i8", "byte", "kept between input gradient and weight gradient"),
    ("held_input_bytes", "i8", "byte", "inputs among what is kept for the weight gradient"),
    (
        "held_output_grad_bytes",
        "i8",
        "byte",
        "gradients of outputs among what is kept for the weight gradient",
    ),
)
PAIRS: tuple[tuple[str, str], ...] = (
    ("saved_later", "made here, and saved first by the layer so many further on"),
    ("unsaved_from", "given and not yet saved, made by the layer so many back"),
    ("backward_peak_at", "most in backward where the stage ends so many layers further on"),
    ("passed_at", "passed on as it is by a stage that begins here and ends so many layers further on"),
)
ROOT = ("model", "height_px", "width_px", "micro_batch_size", "dtype", "device", "source", "input_bytes")


def write_profile(group: h5py.Group, profile: ModelProfile) -> None:
    """Writes a profile into an empty group: attributes of the whole, and columns with an entry a layer.

    Pairs stand in tables of three columns: layer, how many layers away, bytes.
    """
    group.attrs["schema"] = SCHEMA
    for name in ROOT:
        group.attrs[name] = getattr(profile, name)
    group.attrs["versions"] = json.dumps(dict(profile.versions))
    group.attrs["facts"] = json.dumps(dict(profile.facts))
    for name in ("name", "kind"):
        words = np.array([getattr(layer, name) for layer in profile.layers], dtype=h5py.string_dtype())
        _write(group, name, words, "1", f"{name} of the layer")
    for name, kind, units, long_name in COLUMNS:
        values = np.array([getattr(layer, name) for layer in profile.layers], dtype=kind)
        _write(group, name, values, units, long_name)
    for name, long_name in PAIRS:
        rows = [(index, *pair) for index, layer in enumerate(profile.layers) for pair in getattr(layer, name)]
        table = np.array(rows, dtype="i8").reshape(-1, 3)
        _write(group, name, table, "1, 1, byte", f"{long_name}: layer, layers away, bytes")


def add_to_trace(path: Path, profile: ModelProfile) -> None:
    """Writes a profile into a trace file, as /profile."""
    with h5py.File(path, "a") as file:
        write_profile(file.create_group("profile"), profile)


def read_profile(group: h5py.Group) -> ModelProfile:
    """Reads what `write_profile` wrote.

    Raises:
        ConfigError: a profile of another schema.
    """
    names = [text.decode() for text in group["name"][:]]
    kinds = [text.decode() for text in group["kind"][:]]
    columns = {name: group[name][:].tolist() for name, *_ in COLUMNS}
    pairs: dict[str, list[list[tuple[int, int]]]] = {name: [[] for _ in names] for name, _ in PAIRS}
    for name, _ in PAIRS:
        for layer, away, num_bytes in group[name][:].tolist():
            pairs[name][layer].append((away, num_bytes))
    layers = [
        {
            "name": names[index], "kind": kinds[index],
            **{name: values[index] for name, values in columns.items()},
            **{name: rows[index] for name, rows in pairs.items()},
        }
        for index in range(len(names))
    ]  # fmt: skip
    root = {name: _plain(group.attrs[name]) for name in ROOT}
    more = {name: json.loads(group.attrs[name]) for name in ("versions", "facts")}
    return ModelProfile.from_json(
        {"schema": _plain(group.attrs["schema"]), **root, **more, "layers": layers}, group.name
    )


def _write(group: h5py.Group, name: str, values: np.ndarray, units: str, long_name: str) -> None:
    dataset = group.create_dataset(name, data=values)
    dataset.attrs["units"] = units
    dataset.attrs["long_name"] = long_name


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value

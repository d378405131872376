"""A profile in a trace file: a group with a column, unit and long name for each layer field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gems.profile.model_profile import (
    LONG_NAMES,
    PAIRS,
    SCHEMA,
    SIZES,
    STORAGES,
    TIMES,
    ModelProfile,
)

ROOT = (
    "model",
    "height_px",
    "width_px",
    "micro_batch_size",
    "dtype",
    "device",
    "source",
    "input_bytes",
)
DEPTH = "depth_px"  # of volumes


def write_profile(group: h5py.Group, profile: ModelProfile) -> None:
    """Write a profile into an empty group: attributes of the model, and columns of its layers.

    Pairs are tables of three columns: layer, distance in layers, bytes. Storages are JSON texts.
    """
    group.attrs["schema"] = SCHEMA
    for name in ROOT:
        group.attrs[name] = getattr(profile, name)
    if profile.depth_px is not None:
        group.attrs[DEPTH] = profile.depth_px
    group.attrs["versions"] = json.dumps(dict(profile.versions))
    group.attrs["facts"] = json.dumps(dict(profile.facts))
    for name in ("name", "kind"):
        _write_texts(
            group, name, [getattr(layer, name) for layer in profile.layers], f"{name} of the layer"
        )
    for name in STORAGES:
        texts = [json.dumps(list(map(asdict, getattr(layer, name)))) for layer in profile.layers]
        _write_texts(group, name, texts, f"{LONG_NAMES[name]}: JSON of its storages")
    for names, kind, units in ((TIMES, "f8", "s"), (SIZES, "i8", "byte")):
        for name in names:
            values = np.array([getattr(layer, name) for layer in profile.layers], dtype=kind)
            _write(group, name, values, units, LONG_NAMES[name])
    for name in PAIRS:
        rows = [
            (index, *pair)
            for index, layer in enumerate(profile.layers)
            for pair in getattr(layer, name)
        ]
        _write(
            group,
            name,
            np.array(rows, dtype="i8").reshape(-1, 3),
            "1, 1, byte",
            f"{LONG_NAMES[name]}: layer, layers away, bytes",
        )


def add_to_trace(path: Path, profile: ModelProfile) -> None:
    """Write a profile into a trace file, as /profile."""
    with h5py.File(path, "a") as file:
        write_profile(file.create_group("profile"), profile)


def read_profile(group: h5py.Group) -> ModelProfile:
    """Read a profile written by `write_profile`.

    Raises:
        ConfigError: the profile has another schema.
    """
    layers: list[dict[str, Any]] = [
        {
            "name": name.decode(),
            "kind": kind.decode(),
            **{field: [] for field in (*PAIRS, *STORAGES)},
        }
        for name, kind in zip(group["name"][:], group["kind"][:], strict=True)
    ]
    for column in group.keys() & {*TIMES, *SIZES}:
        for layer, value in zip(layers, group[column][:].tolist(), strict=True):
            layer[column] = value
    for name in PAIRS:
        for index, away, num_bytes in group[name][:].tolist():
            layers[index][name].append((away, num_bytes))
    for name in STORAGES:
        # older files have none, or tables of numbers
        if name in group and h5py.check_string_dtype(group[name].dtype):
            for layer, text in zip(layers, group[name][:], strict=True):
                layer[name] = json.loads(text)
    root = {name: _plain(group.attrs[name]) for name in ("schema", *ROOT)}
    if DEPTH in group.attrs:
        root[DEPTH] = _plain(group.attrs[DEPTH])
    more = {name: json.loads(group.attrs[name]) for name in ("versions", "facts")}
    return ModelProfile.from_json({**root, **more, "layers": layers}, group.name)


def _write_texts(group: h5py.Group, name: str, texts: Sequence[str], long_name: str) -> None:
    _write(group, name, np.array(texts, dtype=h5py.string_dtype()), "1", long_name)


def _write(group: h5py.Group, name: str, values: np.ndarray, units: str, long_name: str) -> None:
    dataset = group.create_dataset(name, data=values)
    dataset.attrs["units"] = units
    dataset.attrs["long_name"] = long_name


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value

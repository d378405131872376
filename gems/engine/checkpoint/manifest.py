"""The manifest: what makes the shards of all ranks one checkpoint, and the folders that checkpoints lie in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.engine.checkpoint.shard import Written, sync_folder
from gems.schedule.schedule import Schedule

SCHEMA = "gems.checkpoint/1"
MANIFEST_JSON = "manifest.json"
DAMAGED = ".damaged"
PREFIX = "step"
OF_ANY_PLACE = ("path", "prefetch_steps")  # what of a model's and its data's configuration changes neither


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint of the state before `step`; `samples` were seen by then.

    `identity` is what a run must have in common with it to go on from it, `layout` what it must have for each rank to
    find its own random states, and `owners` the rank whose file has a layer.
    """

    step: int
    attempt: int
    samples: int
    utc: str
    identity: Mapping[str, Any]
    layout: Mapping[str, Any]
    owners: Mapping[str, int]
    files: tuple[Written, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(written.num_bytes for written in self.files)

    def write(self, folder: Path) -> None:
        """Write the manifest, which makes a checkpoint of the files beside it; it appears whole, and on disk.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{MANIFEST_JSON}.partial"
        with partial.open("w") as file:
            json.dump({"schema": SCHEMA, **asdict(self)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / MANIFEST_JSON)
        sync_folder(folder)
        sync_folder(folder.parent)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint's folder.

        Raises:
            OSError: there is none, or it cannot be read.
            ValueError: it is not one, or of a newer schema.
        """
        document = json.loads((folder / MANIFEST_JSON).read_text())
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise ValueError(f"not of the schema {SCHEMA}")
        try:
            files = tuple(Written(**written) for written in document.pop("files"))
            return cls(**document, files=files)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a key is missing or not known ({error})") from error


def identity_of(spec: RunSpec) -> dict[str, Any]:
    """Return what two runs must have in common for one to go on from the other's state, as plain values.

    The order of samples is a pure function of the seed, the step and the global batch, so these are among it. Steps, the
    learning rate and the rest of the optimizer's numbers may differ, and so may partitions, replicas, schedule and memory.
    """
    whole = spec.to_dict()
    common = {
        section: {key: value for key, value in whole[section].items() if key not in OF_ANY_PLACE}
        for section in ("model", "data")
    }
    common["train"] = {"optimizer": spec.train.optimizer, "dtype": spec.train.dtype}
    plain: dict[str, Any] = json.loads(json.dumps({**common, "seed": spec.seed, "global batch": global_batch(spec)}))
    return plain


def layout_of(spec: RunSpec, schedule: Schedule, cuts: tuple[int, ...]) -> dict[str, Any]:
    """Return which rank holds which layers, as plain values."""
    return {
        "partitions": spec.parallel.partitions, "replicas": spec.parallel.replicas, "boundaries": list(cuts),
        "placement": [list(ranks) for ranks in schedule.placement.ranks],
    }  # fmt: skip


def difference(theirs: Mapping[str, Any], mine: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """Return the first key in which two identities differ, with both values; None where they are the same."""
    for key in sorted({*theirs, *mine}):
        left, right = theirs.get(key), mine.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            inner = difference(left, right, f"{prefix}{key}.")
            if inner is not None:
                return inner
        elif left != right:
            return f"{prefix}{key}", left, right
    return None


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint before a step."""
    return checkpoints / f"{PREFIX}{step:08d}"


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Return the folders below `checkpoints` that have a manifest, the newest step first."""
    return [folder for step, folder in _by_step(checkpoints) if (folder / MANIFEST_JSON).exists()]


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what older steps left without a manifest.

    A folder loses its manifest first, so that half of it is never taken for a checkpoint.
    """
    found = _by_step(checkpoints)
    whole = [entry for entry in found if (entry[1] / MANIFEST_JSON).exists()]
    for step, folder in found:  # newer ones without a manifest are being written
        if whole and step < whole[0][0] and (step, folder) not in whole[:keep]:
            with contextlib.suppress(OSError):
                (folder / MANIFEST_JSON).unlink(missing_ok=True)
                shutil.rmtree(folder)


def _by_step(checkpoints: Path) -> list[tuple[int, Path]]:
    found = []
    for folder in checkpoints.glob(f"{PREFIX}*"):
        digits = folder.name.removeprefix(PREFIX)
        if digits.isdecimal():
            found.append((int(digits), folder))
    return sorted(found, reverse=True)

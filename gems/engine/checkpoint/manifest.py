"""The manifest, which makes the shards of all ranks one checkpoint, and the folders of checkpoints."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.engine.checkpoint.shard import ShardFile
from gems.schedule.schedule import Schedule
from gems.utils.atomic_io import atomic_write, sync_to_disk

SCHEMA = "gems.checkpoint/1"
MANIFEST_JSON = "manifest.json"
DAMAGED = ".damaged"
PREFIX = "step"
IRRELEVANT_KEYS = ("path", "prefetch_steps")  # of a model and its data: they change neither


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint of the state before `step`, after `samples`.

    A run can continue from it if its `identity` is the same. If its `layout` is the same too, each rank finds its own
    random states. `owners` gives the rank whose file has a layer.
    """

    step: int
    attempt: int
    samples: int
    utc: str
    identity: Mapping[str, Any]
    layout: Mapping[str, Any]
    owners: Mapping[str, int]
    files: tuple[ShardFile, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(written.num_bytes for written in self.files)

    def write(self, folder: Path) -> None:
        """Write and sync the manifest, which makes the files beside it a checkpoint.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / MANIFEST_JSON, sync=True) as partial:
            partial.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}))
        sync_to_disk(folder.parent)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint's folder.

        Raises:
            OSError: there is none, or it cannot be read.
            ValueError: it is no manifest, or of another schema.
        """
        document = json.loads((folder / MANIFEST_JSON).read_text())
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        try:
            files = tuple(ShardFile(**written) for written in document.pop("files"))
            return cls(**document, files=files)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a key is missing or unknown ({error})") from error


def run_identity(spec: RunSpec) -> dict[str, Any]:
    """Return what must be equal for a run to continue from another's state, as plain values.

    Seed and global batch are part of it, since with the step they determine the order of samples. Steps, learning rate
    and other numbers of the optimizer may differ, and so may partitions, replicas, schedule and memory policy.
    """
    whole = spec.to_dict()
    common = {
        section: {key: value for key, value in whole[section].items() if key not in IRRELEVANT_KEYS}
        for section in ("model", "data")
    }
    common["train"] = {"optimizer": spec.train.optimizer, "dtype": spec.train.dtype}
    plain: dict[str, Any] = json.loads(json.dumps({**common, "seed": spec.seed, "global batch": global_batch(spec)}))
    return plain


def rank_layout(spec: RunSpec, schedule: Schedule, boundaries: tuple[int, ...]) -> dict[str, Any]:
    """Return which rank has which layers, as plain values."""
    return {
        "partitions": spec.parallel.partitions, "replicas": spec.parallel.replicas, "boundaries": list(boundaries),
        "placement": [list(ranks) for ranks in schedule.placement.ranks],
    }  # fmt: skip


def difference(theirs: Mapping[str, Any], mine: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """Return the first key in which two identities differ, with both values; None if they are equal."""
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
    """Return the folders in `checkpoints` that have a manifest, the newest step first."""
    return [folder for step, folder in _by_step(checkpoints) if (folder / MANIFEST_JSON).exists()]


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all checkpoints except the newest `keep`, and older folders without a manifest.

    The manifest is removed first, so that an incomplete folder is never taken for a checkpoint.
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

"""The files of checkpoints: shards, the manifest that joins them, and their folders.

A shard has one rank's tensors in a safetensors file (github.com/huggingface/safetensors): a header
with the byte range of each tensor, then their bytes. So a rank of another partition reads only its
own layers, nothing is unpickled, and no process group is needed, unlike for
torch.distributed.checkpoint. The library writes straight from the tensors' memory, without the
interpreter's lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from gems.config.checkpoint_schema import MANIFEST_JSON, SCHEMA
from gems.config.schema import RunSpec
from gems.plan.rank_plan import RankPlan
from gems.utils.atomic_io import atomic_write, sync_to_disk
from gems.utils.targets import source_of
from gems.utils.units import bytes_unit

if TYPE_CHECKING:  # emulated ranks read manifests without torch
    from torch import Tensor

CHUNK_BYTES = 1 << 24
MARGIN_BYTES = 1 << 16  # of a checkpoint, for its manifest and the blocks of its files
DAMAGED = ".damaged"
PREFIX = "step"
CODE = "code"  # the hashes of the user's own code in an identity
IRRELEVANT_KEYS = ("path", "prefetch_steps")  # of a model and its data: they change neither


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file as it was written. CRC-32 takes 3.1 GB/s on a core (measured), BLAKE2b 0.5."""

    name: str
    num_bytes: int
    crc32: int


def shard_name(rank: int) -> str:
    """Return the file name of a rank."""
    return f"rank{rank:04d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> ShardFile:
    """Write and sync a file that appears complete or not at all, and return its size and checksum.

    Raises:
        OSError: it cannot be written; no part of it is left.
    """
    from safetensors.torch import save_file

    with atomic_write(path, sync=True) as partial:
        try:
            save_file(dict(tensors), partial, {"format": "pt"})
        except SafetensorError as error:  # which has the system's number in its text alone
            if (number := re.search(r"os error (\d+)", str(error))) is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        written = ShardFile(path.name, partial.stat().st_size, _checksum(partial))
    return written


def _checksum(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def find_damage(folder: Path, written: ShardFile) -> str | None:
    """Return what is wrong with a file; None if it is as it was written."""
    path = folder / written.name
    try:
        size = path.stat().st_size
        if size != written.num_bytes:
            return f"{written.name} has {size} bytes instead of {written.num_bytes}"
        crc32 = _checksum(path)
    except OSError as error:
        return f"{written.name} cannot be read ({error.strerror})"
    return (
        None
        if crc32 == written.crc32
        else f"{written.name} has another checksum than it was written with"
    )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint of the state before `step`, after `samples`.

    A run can continue from it if its `identity` is the same. If its `layout` is the same too, each
    rank finds its own random states. `owners` gives the rank whose file has a layer.
    """

    step: int
    attempt: int
    samples: int
    utc: str
    identity: Mapping[str, Any]
    layout: Mapping[str, Any]
    owners: Mapping[str, int]
    files: tuple[ShardFile, ...] = field(default=())

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

    Seed and global batch are part of it, since with the step they determine the order of samples.
    Steps, learning rate and other numbers of the optimizer may differ, and so may partitions,
    replicas, schedule and memory policy.
    """
    whole: dict[str, Any] = json.loads(json.dumps(spec.to_dict()))  # plain values
    identity: dict[str, Any] = {
        section: {key: value for key, value in whole[section].items() if key not in IRRELEVANT_KEYS}
        for section in ("model", "data")
    }
    identity["optimizer"] = {"name": spec.optimizer.target or spec.optimizer.name}
    identity["train"] = {"dtype": spec.train.dtype}
    identity[CODE] = {target: source_of(target, path) for target, path in spec.own_code()}
    return identity | {"seed": spec.seed, "global batch": spec.parallel.global_batch}


def changed_code(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return one of the user's targets whose code has changed since a checkpoint was saved, or None.

    Checkpoints of versions that did not record the code are not compared.
    """
    before = theirs.get(CODE, {})
    now = ours.get(CODE, {})
    return next((target for target in now if before.get(target, now[target]) != now[target]), None)


def rank_layout(plan: RankPlan) -> dict[str, Any]:
    """Return which rank has which layers, as plain values."""
    return {
        "partitions": plan.spec.parallel.partitions,
        "replicas": plan.spec.parallel.replicas,
        "boundaries": list(plan.boundaries),
        "placement": [list(ranks) for ranks in plan.schedule.placement.ranks],
    }


def difference(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """Return the first key in which two identities differ except in code, with both values.

    None if they are equal.
    """
    for key in sorted({*theirs, *ours} - {CODE}):
        their_value = theirs.get(key)
        our_value = ours.get(key)
        if isinstance(their_value, Mapping) and isinstance(our_value, Mapping):
            inner = difference(their_value, our_value, f"{prefix}{key}.")
            if inner is not None:
                return inner
        elif their_value != our_value:
            return f"{prefix}{key}", their_value, our_value
    return None


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint before a step."""
    return checkpoints / f"{PREFIX}{step:08d}"


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Return the folders in `checkpoints` that have a manifest, the newest step first."""
    return [folder for folder in _newest_first(checkpoints) if (folder / MANIFEST_JSON).exists()]


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all checkpoints except the newest `keep`, and older folders without a manifest.

    The manifest is removed first, so that an incomplete folder is never taken for a checkpoint.
    """
    folders = _newest_first(checkpoints)
    whole = checkpoint_folders(checkpoints)
    for folder in (
        folders[folders.index(whole[0]) :] if whole else ()
    ):  # newer ones are being written
        if folder not in whole[:keep]:
            with contextlib.suppress(OSError):
                (folder / MANIFEST_JSON).unlink(missing_ok=True)
                shutil.rmtree(folder)


def make_room(checkpoints: Path, needed_bytes: int) -> None:
    """Check that there is room for one more checkpoint, and remove older ones if that makes room.

    The newest stays.

    Raises:
        OSError: there is none, and nothing is removed; or the file system does not answer.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(checkpoints)
    needed_bytes = needed_bytes + MARGIN_BYTES
    free_bytes = disk.f_bavail * disk.f_frsize
    whole = checkpoint_folders(checkpoints)
    gain_bytes = 0
    keep = len(whole)
    while free_bytes + gain_bytes < needed_bytes and keep > 1:
        keep -= 1
        gain_bytes += sum(file.stat().st_size for file in whole[keep].iterdir())
    if free_bytes + gain_bytes < needed_bytes and disk.f_blocks:  # some file systems do not count
        unit = bytes_unit([needed_bytes])
        needed, free = (f"{unit.show(size)} {unit.name}" for size in (needed_bytes, free_bytes))
        text = f"{os.strerror(errno.ENOSPC)} ({needed} needed, {free} free)"
        raise OSError(errno.ENOSPC, text, str(checkpoints))
    if keep < len(whole):
        prune(checkpoints, keep)


def _newest_first(checkpoints: Path) -> list[Path]:
    by_step = {
        folder.name.removeprefix(PREFIX): folder for folder in checkpoints.glob(f"{PREFIX}*")
    }
    return [by_step[step] for step in sorted(filter(str.isdecimal, by_step), key=int, reverse=True)]

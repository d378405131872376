"""Resume: the checkpoint from which a run continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gems.config.schema import RESUME_AUTO, RESUME_NEVER, RunSpec
from gems.engine.checkpoint.manifest import (
    DAMAGED,
    MANIFEST_JSON,
    Manifest,
    checkpoint_folders,
    difference,
    rank_layout,
    run_identity,
)
from gems.engine.checkpoint.shard import find_damage
from gems.engine.transport.mpi import Comm
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.schedule.schedule import Schedule

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint and its folder; `is_own` if the run itself has saved it."""

    manifest: Manifest
    folder: Path
    is_own: bool


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where an attempt begins: its number, and the checkpoint that it continues from, if any."""

    attempt: int
    checkpoint: FoundCheckpoint | None = None

    @property
    def step(self) -> int:
        """The first step to run."""
        return 0 if self.checkpoint is None else self.checkpoint.manifest.step

    def attributes(self) -> dict[str, int | str]:
        """Return the attributes of the attempt for a trace part, with its clock beside the time of day.

        `continues` is 1 if the attempt continues from an earlier one of the same run.
        """
        return {
            "attempt": self.attempt, "first_step": self.step,
            "continues": int(self.checkpoint is not None and self.checkpoint.is_own),
            "resumed_from": "" if self.checkpoint is None else str(self.checkpoint.folder),
            "utc_ns": time.time_ns(), "utc_at_ns": time.perf_counter_ns(),
        }  # fmt: skip

    def manifest(
        self, spec: RunSpec, schedule: Schedule, boundaries: tuple[int, ...], owners: Mapping[str, int]
    ) -> Manifest:
        """Return the manifest of the state in which this attempt begins; later ones are made from it."""
        samples = 0 if self.checkpoint is None else self.checkpoint.manifest.samples
        layout = rank_layout(spec, schedule, boundaries)
        return Manifest(self.step, self.attempt, samples, "", run_identity(spec), layout, owners)


def find_start(spec: RunSpec, folder: RunFolder, comm: Comm) -> StartPoint:
    """Find where this attempt begins; collective.

    Raises:
        ConfigError: as `find_checkpoint`.
    """
    attempt = comm.bcast(folder.attempt)
    found = find_checkpoint(spec, folder, comm)
    if found is not None and comm.rank == 0:
        manifest = found.manifest
        size = f"{len(manifest.files)} files, {manifest.num_bytes / 1e6:.1f} MB"
        _log.info("continues before step %d from %s (%s)", manifest.step, found.folder, size)
    return StartPoint(attempt, found)


def find_checkpoint(spec: RunSpec, folder: RunFolder, comm: Comm) -> FoundCheckpoint | None:
    """Return the newest complete checkpoint that the run can continue from, None for none; collective.

    The run's own come before those of the folder `train.resume`. All ranks share the reading of the files. After a
    damaged checkpoint the one before it is tried.

    Raises:
        ConfigError: that folder has no complete checkpoint, or one of another model, optimizer or global batch.
    """
    resume = spec.train.resume
    if resume == RESUME_NEVER:
        if comm.rank == 0:
            _archive_old(folder)
        return None
    own = _first_complete(folder.checkpoints, comm, is_own=True)
    if own is not None or resume == RESUME_AUTO:
        return _check_fits(own, spec)
    other = _first_complete(Path(resume), comm, is_own=False)
    if other is None:
        raise ConfigError(
            "train.resume", resume, f"has no complete checkpoint ({MANIFEST_JSON})",
            "give the folder of a run that saved its state, or of one checkpoint",
        )  # fmt: skip
    return _check_fits(other, spec)


def _check_fits(found: FoundCheckpoint | None, spec: RunSpec) -> FoundCheckpoint | None:
    if found is None:
        return None
    other = difference(found.manifest.identity, run_identity(spec))
    if other is not None:
        key, theirs, mine = other
        raise ConfigError(
            "train.resume", found.folder, f"was saved with another {key}: {theirs}, and here it is {mine}",
            "use the same, or start from its weights alone with train.initial_checkpoint",
        )  # fmt: skip
    done = found.manifest.step
    if done > spec.train.steps or (done == spec.train.steps and not found.is_own):
        raise ConfigError("train.steps", spec.train.steps, f"{found.folder} has {done} steps done", "give more steps")
    return found


def _first_complete(folder: Path, comm: Comm, is_own: bool) -> FoundCheckpoint | None:
    """Read and check checkpoints, the newest first, until one is complete; all ranks use what rank 0 sees."""
    candidates = comm.bcast(list(_candidates(folder)) if comm.rank == 0 else None)
    for candidate in candidates:
        manifest, damage = comm.bcast(_read(candidate) if comm.rank == 0 else None)
        if manifest is not None:
            mine = manifest.files[comm.rank :: comm.size]
            damages = comm.allgather(next((d for w in mine if (d := find_damage(candidate, w)) is not None), None))
            damage = next((damage for damage in damages if damage is not None), None)
            if damage is None:
                return FoundCheckpoint(manifest, candidate, is_own)
        if comm.rank == 0:
            aside = candidate.with_name(candidate.name + DAMAGED)
            is_last = candidate == candidates[-1]
            what = "there is none before it" if is_last else "the one before it is tried"
            _log.warning("checkpoint %s is damaged: %s; %s", candidate, damage, what)
            if is_own and not aside.exists():
                candidate.rename(aside)
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield the folder itself if it is a checkpoint, otherwise those in this run folder or folder of checkpoints."""
    if (folder / MANIFEST_JSON).exists():
        yield folder
        return
    inner = RunFolder(folder).checkpoints
    yield from checkpoint_folders(inner if inner.is_dir() else folder)


def _read(folder: Path) -> tuple[Manifest | None, str | None]:
    try:
        return Manifest.read(folder), None
    except (OSError, ValueError) as error:
        return None, f"{MANIFEST_JSON} cannot be read ({error})"


def _archive_old(folder: RunFolder) -> None:
    """Move the checkpoints of earlier attempts to the folder of the last of them."""
    if folder.checkpoints.is_dir():
        target = folder.path / "attempts" / f"{max(folder.attempt - 1, 1):03d}"
        target.mkdir(parents=True, exist_ok=True)
        if not (target / folder.checkpoints.name).exists():
            folder.checkpoints.rename(target / folder.checkpoints.name)

"""Resume: which checkpoint a run goes on from."""

from __future__ import annotations

import sys
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
    identity_of,
    layout_of,
)
from gems.engine.checkpoint.shard import damage_of
from gems.engine.transport.mpi import Comm
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Found:
    """A whole checkpoint that suits the run, and its folder. `is_own` tells that the run itself has left it."""

    manifest: Manifest
    folder: Path
    is_own: bool


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where an attempt begins: its number, and what it goes on from; None for the first step."""

    attempt: int
    found: Found | None = None

    @property
    def step(self) -> int:
        """The first step to run."""
        return 0 if self.found is None else self.found.manifest.step

    def attributes(self) -> dict[str, int | str]:
        """Return what a trace part tells of the attempt, its clock beside the time of day among it.

        `continues` is 1 where the attempt goes on from a state that an earlier one of the same run has left.
        """
        return {
            "attempt": self.attempt, "first_step": self.step,
            "continues": int(self.found is not None and self.found.is_own),
            "resumed_from": "" if self.found is None else str(self.found.folder),
            "utc_ns": time.time_ns(), "utc_at_ns": time.perf_counter_ns(),
        }  # fmt: skip

    def about(self, spec: RunSpec, schedule: Schedule, cuts: tuple[int, ...], owners: Mapping[str, int]) -> Manifest:
        """Return what the manifests of this attempt have in common, with the step and the samples that it begins at."""
        samples = 0 if self.found is None else self.found.manifest.samples
        layout = layout_of(spec, schedule, cuts)
        return Manifest(self.step, self.attempt, samples, "", identity_of(spec), layout, owners)


def beginning_of(spec: RunSpec, folder: RunFolder, comm: Comm) -> Beginning:
    """Find where this attempt begins, and says so where that is not at the first step; collective.

    Raises:
        ConfigError: as `find_checkpoint`.
    """
    attempt = comm.bcast(folder.attempt)
    found = find_checkpoint(spec, folder, comm)
    if found is not None and comm.rank == 0:
        manifest = found.manifest
        size = f"{len(manifest.files)} files, {manifest.num_bytes / 1e6:.1f} MB"
        print(f"gems: goes on before step {manifest.step} from {found.folder} ({size})", file=sys.stderr, flush=True)
    return Beginning(attempt, found)


def find_checkpoint(spec: RunSpec, folder: RunFolder, comm: Comm) -> Found | None:
    """Return the newest whole checkpoint that the run shall go on from, None for a start at the first step; collective.

    The run's own go before those of the folder that `train.resume` names. All ranks share the reading of all files. A
    damaged checkpoint is named on stderr, and the one before it is tried.

    Raises:
        ConfigError: the folder named holds none that is whole, or it is of another model, optimizer or global batch.
    """
    resume = spec.train.resume
    if resume == RESUME_NEVER:
        if comm.rank == 0:
            _put_aside(folder)
        return None
    own = _first_whole(folder.checkpoints, comm, is_own=True)
    if own is not None or resume == RESUME_AUTO:
        return _suited(own, spec)
    other = _first_whole(Path(resume), comm, is_own=False)
    if other is None:
        raise ConfigError(
            "train.resume", resume, f"holds no whole checkpoint ({MANIFEST_JSON})",
            "give the folder of a run that saved its state, or of one checkpoint",
        )  # fmt: skip
    return _suited(other, spec)


def _suited(found: Found | None, spec: RunSpec) -> Found | None:
    if found is None:
        return None
    other = difference(found.manifest.identity, identity_of(spec))
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


def _first_whole(folder: Path, comm: Comm, is_own: bool) -> Found | None:
    """Read and checks checkpoints, the newest first, until one is whole; all ranks see what rank 0 sees."""
    candidates = comm.bcast(list(_candidates(folder)) if comm.rank == 0 else None)
    for candidate in candidates:
        manifest, damage = comm.bcast(_read(candidate) if comm.rank == 0 else None)
        if manifest is not None:
            mine = manifest.files[comm.rank :: comm.size]
            damages = comm.allgather(next((d for w in mine if (d := damage_of(candidate, w)) is not None), None))
            damage = next((damage for damage in damages if damage is not None), None)
            if damage is None:
                return Found(manifest, candidate, is_own)
        if comm.rank == 0:
            aside = candidate.with_name(candidate.name + DAMAGED)
            is_last = candidate == candidates[-1]
            what = "there is none before it" if is_last else "the one before it is tried"
            print(f"gems: checkpoint {candidate} is damaged: {damage}; {what}", file=sys.stderr, flush=True)
            if is_own and not aside.exists():
                candidate.rename(aside)
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints in a run's folder, in a folder of checkpoints, or the one that the folder itself is."""
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


def _put_aside(folder: RunFolder) -> None:
    """Move what earlier attempts saved to the last of them: the run's own checkpoints begin anew."""
    if folder.checkpoints.is_dir():
        target = folder.path / "attempts" / f"{max(folder.attempt - 1, 1):03d}"
        target.mkdir(parents=True, exist_ok=True)
        if not (target / folder.checkpoints.name).exists():
            folder.checkpoints.rename(target / folder.checkpoints.name)

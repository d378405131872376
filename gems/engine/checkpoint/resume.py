"""Resume: the checkpoint from which a run continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gems.config.checkpoint_schema import MANIFEST_JSON, other_schema, schema_error
from gems.config.schema import RunSpec
from gems.config.training import RESUME_AUTO, RESUME_FORCE, RESUME_NEVER
from gems.engine.checkpoint.manifest import (
    DAMAGED,
    Manifest,
    changed_code,
    checkpoint_folders,
    difference,
    find_damage,
    rank_layout,
    run_identity,
)
from gems.engine.transport.mpi import Comm, allgather, broadcast
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.schedule.schedule import Schedule

_log = logging.getLogger(__name__)


Checkpoint = tuple[Path, Manifest]  # a complete one


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where an attempt begins: its number, and the checkpoint that it continues from, if any.

    `is_own` if the run itself has saved the checkpoint; `layout` is the number of the run's present
    layout.
    """

    attempt: int
    checkpoint: Checkpoint | None = None
    is_own: bool = False
    layout: int = 1

    @property
    def step(self) -> int:
        """Return the first step to run."""
        return 0 if self.checkpoint is None else self.checkpoint[1].step

    def attributes(self) -> dict[str, int | str]:
        """Return the attempt's attributes for a trace part, with its clock and the time of day.

        `continues` is 1 if the attempt continues from an earlier one of the same run.
        """
        return {
            "attempt": self.attempt,
            "first_step": self.step,
            "continues": int(self.is_own),
            "layout": self.layout,
            "resumed_from": "" if self.checkpoint is None else str(self.checkpoint[0]),
            "utc_ns": time.time_ns(),
            "utc_at_ns": time.perf_counter_ns(),
        }

    def manifest(
        self,
        spec: RunSpec,
        schedule: Schedule,
        boundaries: tuple[int, ...],
        owners: Mapping[str, int],
    ) -> Manifest:
        """Return the manifest of the state in which this attempt begins.

        Later ones are made from it.
        """
        samples = 0 if self.checkpoint is None else self.checkpoint[1].samples
        layout = rank_layout(spec, schedule, boundaries)
        return Manifest(self.step, self.attempt, samples, "", run_identity(spec), layout, owners)


def find_start(spec: RunSpec, folder: RunFolder, comm: Comm) -> StartPoint:
    """Find where this attempt begins.

    At the newest complete checkpoint that the run can continue from; collective.
    The run's own come before those of the folder `train.resume`. All ranks share the reading of the
    files. After a damaged checkpoint the one before it is tried.

    Raises:
        ConfigError: that folder has no complete checkpoint, or one of another model, optimizer or
            global batch; or all of the run's own are damaged.
    """
    attempt, layout = broadcast(comm, (folder.attempt, folder.layout_number))
    resume = spec.train.resume
    is_own = True
    if resume == RESUME_NEVER:
        if (
            comm.rank == 0 and folder.checkpoints.is_dir()
        ):  # those of earlier attempts go with the last of them
            target = (
                folder.path
                / "attempts"
                / f"{max(folder.attempt - 1, 1):03d}"
                / folder.checkpoints.name
            )
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                folder.checkpoints.rename(target)
        return StartPoint(attempt, layout=layout)
    found = _first_complete(folder.checkpoints, comm, resume, is_own)
    if found is None and resume not in (RESUME_AUTO, RESUME_FORCE):
        is_own = False
        found = _first_complete(Path(resume), comm, resume, is_own=False)
        if found is None:
            raise ConfigError(
                "train.resume",
                resume,
                f"has no complete checkpoint ({MANIFEST_JSON})",
                "give the folder of a run that saved its state, or of one checkpoint",
            )
    if found is None:
        if comm.rank == 0 and any(folder.checkpoints.glob("*/")):
            _log.warning(
                "no checkpoint in %s is complete: the run starts at step 0", folder.checkpoints
            )
        return StartPoint(attempt, layout=layout)
    path, manifest = found
    identity = run_identity(spec)
    other = difference(manifest.identity, identity)
    changed = changed_code(manifest.identity, identity)
    if changed is not None and resume != RESUME_FORCE:
        raise ConfigError(
            "train.resume",
            path,
            f"was saved with other code of {changed}",
            "restore that code, or set train.resume=force to go on with the present one",
        )
    if other is not None:
        key, theirs, mine = other
        raise ConfigError(
            "train.resume",
            path,
            f"was saved with another {key}: {theirs}, and here it is {mine}",
            "use the same, or start from its weights alone with train.initial_checkpoint",
        )
    if manifest.step > spec.train.steps or (manifest.step == spec.train.steps and not is_own):
        raise ConfigError(
            "train.steps",
            spec.train.steps,
            f"{path} has {manifest.step} steps done",
            "give more steps",
        )
    if comm.rank == 0:
        size = (
            f"{len(manifest.files)} files,"
            f" {sum(file.num_bytes for file in manifest.files) / 1e6:.1f} MB"
        )
        _log.info("continues before step %d from %s (%s)", manifest.step, path, size)
    return StartPoint(attempt, found, is_own, layout)


def _first_complete(folder: Path, comm: Comm, resume: str, is_own: bool) -> Checkpoint | None:
    """Read and check checkpoints, the newest first, until one is complete.

    All ranks use what rank 0 sees.

    Raises:
        ConfigError: there are some, and all are damaged, or the newest is of another version's
        schema.
    """
    candidates: list[Path] = []
    damaged: list[tuple[Path, str]] = []
    if comm.rank == 0:  # the folder itself, or those in this run folder or folder of checkpoints
        inner = RunFolder(folder).checkpoints
        is_checkpoint = (folder / MANIFEST_JSON).exists()
        candidates = (
            [folder] if is_checkpoint else checkpoint_folders(inner if inner.is_dir() else folder)
        )
    candidates = broadcast(comm, candidates)
    newest = candidates[0] if candidates else None
    schema = broadcast(comm, (other_schema(newest) or "") if comm.rank == 0 else None)
    if schema:
        raise schema_error("train.resume", resume, candidates[0], schema)
    for candidate in candidates:
        manifest, damage = broadcast(comm, _read(candidate) if comm.rank == 0 else None)
        if manifest is not None:
            mine = manifest.files[comm.rank :: comm.size]
            damages = allgather(
                comm, next((d for w in mine if (d := find_damage(candidate, w)) is not None), None)
            )
            damage = next((damage for damage in damages if damage is not None), None)
            if damage is None:
                if comm.rank == 0 and is_own:
                    _move_aside([path for path, _ in damaged])
                return candidate, manifest
        damaged.append((candidate, str(damage)))
        if comm.rank == 0 and candidate != candidates[-1]:
            _log.warning(
                "checkpoint %s is damaged: %s; the one before it is tried", candidate, damage
            )
    aside = broadcast(
        comm, sorted(folder.glob(f"*{DAMAGED}")) if comm.rank == 0 and is_own else None
    )
    damaged += [(path, "it was found so before") for path in reversed(aside or [])]
    if damaged:
        path, damage = damaged[0]
        raise ConfigError(
            "train.resume",
            resume,
            f"all {len(damaged)} checkpoints in {folder} are damaged ({path.name}: {damage})",
            "restore one, or start at step 0 with train.resume=never",
        )
    return None


def _move_aside(damaged: Sequence[Path]) -> None:
    """Rename checkpoints, so that they do not count as newer than those to come."""
    for path in damaged:
        aside = path.with_name(path.name + DAMAGED)
        if not aside.exists():
            path.rename(aside)


def _read(folder: Path) -> tuple[Manifest | None, str | None]:
    try:
        return Manifest.read(folder), None
    except (OSError, ValueError) as error:
        return None, f"{MANIFEST_JSON} cannot be read ({error})"

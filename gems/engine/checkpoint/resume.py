"""Resume: the checkpoint from which a run continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gems.config.checkpoint_schema import MANIFEST_JSON, other_schema, schema_error
from gems.config.schema import RunSpec, TrainConfig
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
from gems.plan.rank_plan import RankPlan
from gems.runs.folder import RunFolder

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

    def manifest(self, plan: RankPlan, owners: Mapping[str, int]) -> Manifest:
        """Return the manifest of the state in which this attempt begins.

        Later ones are made from it.
        """
        samples = 0 if self.checkpoint is None else self.checkpoint[1].samples
        identity = run_identity(plan.spec)
        return Manifest(self.step, self.attempt, samples, "", identity, rank_layout(plan), owners)


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
    new = StartPoint(attempt, layout=layout)
    if resume == RESUME_NEVER:
        if comm.rank == 0:
            _archive_checkpoints(folder)
        return new
    is_own = True
    checkpoint = _first_complete(folder.checkpoints, comm, resume, is_own)
    if checkpoint is None and resume not in (RESUME_AUTO, RESUME_FORCE):
        is_own = False
        checkpoint = _first_complete(Path(resume), comm, resume, is_own)
        if checkpoint is None:
            raise ConfigError(
                "train.resume",
                resume,
                f"has no complete checkpoint ({MANIFEST_JSON})",
                "give the folder of a run that saved its state, or of one checkpoint",
            )
    if checkpoint is None:
        if comm.rank == 0 and any(folder.checkpoints.glob("*/")):
            _log.warning(
                "no checkpoint in %s is complete: the run starts at step 0", folder.checkpoints
            )
        return new
    start = replace(new, checkpoint=checkpoint, is_own=is_own)
    _check_continues(spec.train, run_identity(spec), start)
    if comm.rank == 0:
        path, manifest = checkpoint
        megabytes = sum(file.num_bytes for file in manifest.files) / 1e6
        size = f"{len(manifest.files)} files, {megabytes:.1f} MB"
        _log.info("continues before step %d from %s (%s)", manifest.step, path, size)
    return start


def _archive_checkpoints(folder: RunFolder) -> None:
    """Move the checkpoints of earlier attempts to the folder of the last of them."""
    if folder.checkpoints.is_dir():
        last = f"{max(folder.attempt - 1, 1):03d}"
        target = folder.path / "attempts" / last / folder.checkpoints.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            folder.checkpoints.rename(target)


def _check_continues(train: TrainConfig, identity: dict[str, Any], start: StartPoint) -> None:
    """Check that a run can continue from a checkpoint.

    Raises:
        ConfigError: it is of another model, optimizer or global batch, or of other code, or has as
            many steps done as the run has.
    """
    assert start.checkpoint is not None
    path, manifest = start.checkpoint
    other = difference(manifest.identity, identity)
    changed = changed_code(manifest.identity, identity)
    if changed is not None and train.resume != RESUME_FORCE:
        raise ConfigError(
            "train.resume",
            path,
            f"was saved with other code of {changed}",
            "restore that code, or set train.resume=force to go on with the present one",
        )
    if other is not None:
        key, theirs, ours = other
        raise ConfigError(
            "train.resume",
            path,
            f"was saved with another {key}: {theirs}, and here it is {ours}",
            "use the same, or start from its weights alone with train.initial_checkpoint",
        )
    if manifest.step >= train.steps + start.is_own:
        raise ConfigError(
            "train.steps", train.steps, f"{path} has {manifest.step} steps done", "give more steps"
        )


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
            share = manifest.files[comm.rank :: comm.size]
            damages = allgather(
                comm, next((d for w in share if (d := find_damage(candidate, w)) is not None), None)
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

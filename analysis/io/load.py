"""Opening what the user names: a run folder, a complete trace, or the parts of a killed run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gems.errors import ConfigError
from gems.profile import ModelProfile
from gems.runs.folder import RunFolder
from gems.trace import LayerTimes, Trace, join_attempts, merge_parts, read_part, read_trace
from gems.utils.atomic_io import read_json

WHOLE_TRACE = "trace.h5"
PARTS = "trace/rank*.h5"
ATTEMPTS = "attempts/*/"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trace, the files it came from, and notes for the user about what is missing."""

    trace: Trace
    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def load_trace(path: Path) -> Loaded:
    """Read a run folder or a trace file; of a run that was killed it joins the ranks' parts in memory.

    Raises:
        ConfigError: nothing to read there, an unreadable file, a newer schema, or a file of another layout.
    """
    if not path.exists():
        raise ConfigError("path", path, "does not exist", "give a run folder or a trace file")
    if path.is_dir():
        whole = path / WHOLE_TRACE
        if whole.exists():
            return Loaded(_read_whole(whole), (whole,))
        joined = load_parts(path)
        note = f"{path} has no {WHOLE_TRACE}, the run was stopped or goes on"
        return replace(joined, notes=(note, *joined.notes))
    try:
        return Loaded(_read_whole(path), (path,))
    except ConfigError:
        part = _part_or_none(path)
        if part is None:
            raise
    trace = merge_parts([path], {})
    return Loaded(trace, (path,), (f"{path.name} is the part of one rank of {trace.world_size}",))


def _read_whole(path: Path) -> Trace:
    try:
        trace = read_trace(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "trace", path, "not of the trace layout", f"give a trace.h5 of a run folder ({error})"
        ) from error
    missing = {"source", "world_size"} - set(trace.attributes)
    if missing:
        raise ConfigError("trace", path, f"without the root attributes {', '.join(sorted(missing))}")
    return trace


def _part_or_none(path: Path) -> Trace | None:
    try:
        return read_part(path)
    except (ConfigError, KeyError, TypeError, ValueError):
        return None


def load_parts(folder: Path) -> Loaded:
    """Join the ranks' parts in a run folder with those of the attempts that it goes on from, and with the run's files.

    Raises:
        ConfigError: there is none, or none of the last attempt is readable.
    """
    loaded = _load_attempts(folder)
    notes = _add_run_files(loaded.trace, RunFolder(folder))
    return replace(loaded, notes=(*loaded.notes, *notes))


def _load_attempts(folder: Path) -> Loaded:
    loaded = _load_attempt(folder)
    attempts = [loaded]
    for earlier in sorted(folder.glob(ATTEMPTS), reverse=True):
        if not attempts[0].trace.attributes.get("continues"):
            break
        with contextlib.suppress(ConfigError):  # one that left no trace ran no step
            attempts.insert(0, _load_attempt(earlier))
    if len(attempts) == 1:
        return loaded
    trace = join_attempts([attempt.trace for attempt in attempts])
    numbers = ", ".join(map(str, np.unique(trace.steps["attempt"])))
    note = f"{len(trace.steps)} steps are whole, of the attempts {numbers}"
    return Loaded(trace, tuple(path for attempt in attempts for path in attempt.paths), (*loaded.notes, note))


def _load_attempt(folder: Path) -> Loaded:
    """Join the parts of one attempt."""
    found = sorted(folder.glob(PARTS))
    if not found:
        raise ConfigError(
            "path", folder, f"holds neither {WHOLE_TRACE} nor {PARTS}", "give a run folder or a trace file"
        )
    parts = {path: part for path in found if (part := _part_or_none(path)) is not None}
    if not parts:
        read_part(found[0])  # raises with the cause
        raise ConfigError("path", folder, f"none of its {len(found)} parts is readable")
    trace = merge_parts(list(parts), {})
    run = RunFolder(folder)
    if run.run_yaml.is_file():
        trace.run_yaml = run.traced_yaml()
    notes = [
        f"joined {len(parts)} parts of {trace.world_size} ranks, {len(trace.steps)} steps are whole",
        *(f"left out {path.name}: not readable" for path in found if path not in parts),
        *_note_shorter(list(parts.values())),
    ]
    return Loaded(trace, tuple(parts), tuple(notes))


def _note_shorter(parts: Sequence[Trace]) -> list[str]:
    """Name the ranks that finished fewer steps than others."""
    done = {int(part.attributes.get("rank", -1)): len(np.unique(part.rank_steps["step"])) for part in parts}
    most = max(done.values())
    return [
        f"rank {rank} finished {steps} steps, others {most}" for rank, steps in sorted(done.items()) if steps < most
    ]


def _add_run_files(trace: Trace, folder: RunFolder) -> list[str]:
    """Add to a trace the commit, schedule, partition, memory plan and layers' times that its run was prepared with.

    Without a file the trace stays as it was; a damaged file is named in the notes that are returned.
    """
    notes = []
    for path, add in (
        (folder.provenance_json, _add_commit), (folder.schedule_json, _add_schedule),
        (folder.partition_json, _add_boundaries),
        (folder.memory_json, _add_memory_plan), (folder.profile_json, _add_layer_times),
    ):  # fmt: skip
        if not path.exists():
            continue
        try:
            add(trace, folder)
        except (ConfigError, ValueError) as error:
            notes.append(f"left out {path.name}: not readable ({' '.join(str(error).split())})")
    return notes


def _add_commit(trace: Trace, folder: RunFolder) -> None:
    trace.attributes["git_commit"] = read_json(folder.provenance_json).get("git_commit", "unknown")


def _add_schedule(trace: Trace, folder: RunFolder) -> None:
    schedule = folder.read_schedule()
    trace.schedule_rows = tuple(" ".join(map(str, row)) for row in schedule.rows)
    trace.schedule_sha256 = schedule.digest()


def _add_boundaries(trace: Trace, folder: RunFolder) -> None:
    trace.boundaries = folder.read_boundaries()


def _add_memory_plan(trace: Trace, folder: RunFolder) -> None:
    if folder.read_memory_plan() is None:
        raise ValueError("holds no plan")
    trace.memory_plan = folder.memory_json.read_text()


def _add_layer_times(trace: Trace, folder: RunFolder) -> None:
    profile = ModelProfile.from_json(read_json(folder.profile_json), folder.profile_json)
    columns = (
        tuple(float(getattr(layer, name)) for layer in profile.layers)
        for name in ("forward_s", "input_grad_s", "weight_grad_s")
    )
    trace.layer_times = LayerTimes(profile.source, *columns)

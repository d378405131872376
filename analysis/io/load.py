"""Find and open studies, run folders, complete traces, or the parts of a killed run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gems.errors import ConfigError
from gems.profile import ModelProfile
from gems.runs.folder import RunFolder, describe_change
from gems.runs.lookup import runs_of_name
from gems.trace import LayerTimes, Trace, join_attempts, merge_parts, read_part, read_trace
from gems.utils.atomic_io import read_json

WHOLE_TRACE = "trace.h5"
PARTS = "trace/rank*.h5"
ATTEMPTS = "attempts/*/"
STUDY_JSON = "study.json"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trace, the files that it was read from, and notes for the user about missing data."""

    trace: Trace
    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def load_trace(path: Path) -> Loaded:
    """Read a run folder or a trace file.

    If the run was killed, the parts of its ranks are merged in memory.

    Raises:
        ConfigError: There is nothing to read, or a file is unreadable, of a newer schema or of
            another layout.
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
        raise ConfigError(
            "trace", path, f"without the root attributes {', '.join(sorted(missing))}"
        )
    return trace


def _part_or_none(path: Path) -> Trace | None:
    try:
        return read_part(path)
    except (ConfigError, KeyError, TypeError, ValueError):
        return None


def load_parts(folder: Path) -> Loaded:
    """Merge the parts of all ranks and attempts in a run folder, and add the run's files.

    Earlier attempts count if the last one continues them. Attempts on another layout, with
    different ranks and stages, are named in the notes and left out.

    Raises:
        ConfigError: There are no parts, or none of the last attempt is readable.
    """
    attempts = [loaded := _load_attempt(folder)]
    trace = loaded.trace
    notes = [*loaded.notes]
    for path in sorted(folder.glob(ATTEMPTS), reverse=True):
        if not attempts[0].trace.attributes.get("continues"):
            break
        with contextlib.suppress(ConfigError):  # an attempt without a trace ran no step
            earlier = _load_attempt(path)
            if _layout(earlier.trace) != _layout(trace):
                first = attempts[0].trace.attributes.get("first_step", 0)
                notes.append(
                    f"steps before {first} ran on another layout; their traces are {path} and"
                    " before"
                )
                break
            attempts.insert(0, earlier)
    if len(attempts) > 1:
        trace = join_attempts([attempt.trace for attempt in attempts])
        numbers = ", ".join(map(str, np.unique(trace.steps["attempt"])))
        notes.append(f"{len(trace.steps)} steps are whole, of the attempts {numbers}")
    notes += _add_run_files(trace, RunFolder(folder))
    return Loaded(
        trace, tuple(path for attempt in attempts for path in attempt.paths), tuple(notes)
    )


def _layout(trace: Trace) -> tuple[int, int]:
    return trace.world_size, int(trace.attributes.get("layout", 1))


def _load_attempt(folder: Path) -> Loaded:
    """Merge the parts of one attempt."""
    found = sorted(folder.glob(PARTS))
    if not found:
        raise ConfigError(
            "path",
            folder,
            f"holds neither {WHOLE_TRACE} nor {PARTS}",
            "give a run folder or a trace file",
        )
    parts = {path: part for path in found if (part := _part_or_none(path)) is not None}
    if not parts:
        read_part(found[0])  # raises with the cause
        raise ConfigError("path", folder, f"none of its {len(found)} parts is readable")
    trace = merge_parts(list(parts), {})
    run = RunFolder(folder)
    if run.run_yaml.is_file():
        trace.run_yaml = run.traced_yaml()
    done = {
        int(part.attributes.get("rank", -1)): len(np.unique(part.rank_steps["step"]))
        for part in parts.values()
    }
    most = max(done.values())
    notes = [
        (
            f"joined {len(parts)} parts of {trace.world_size} ranks, {len(trace.steps)} steps are"
            " whole"
        ),
        *(f"left out {path.name}: not readable" for path in found if path not in parts),
        *(
            f"rank {rank} finished {steps} steps, others {most}"
            for rank, steps in sorted(done.items())
            if steps < most
        ),
    ]
    return Loaded(trace, tuple(parts), tuple(notes))


def _add_run_files(trace: Trace, folder: RunFolder) -> list[str]:
    """Add to a trace the data with which its run was prepared, and return notes.

    The data are the commit, schedule, partition, memory plan, layers' times and changes of layout.
    A missing file changes nothing; a damaged file is named in the notes.
    """
    notes = []
    commit = folder.provenance_json
    schedule = folder.schedule_json
    partition = folder.partition_json
    for path in (commit, schedule, partition, folder.memory_json, folder.profile_json):
        if not path.exists():
            continue
        try:
            if path == commit:
                trace.attributes["git_commit"] = read_json(path).get("git_commit", "unknown")
            elif path == schedule:
                trace.record(folder.read_schedule())
            elif path == partition:
                trace.boundaries = folder.read_boundaries()
            elif path == folder.memory_json:
                if folder.read_memory_plan() is None:
                    raise ValueError("holds no plan")
                trace.memory_plan = path.read_text()
            else:
                profile = ModelProfile.from_json(read_json(path), path)
                names = ("forward_s", "input_grad_s", "weight_grad_s")
                times = (
                    tuple(float(getattr(layer, name)) for layer in profile.layers) for name in names
                )
                trace.layer_times = LayerTimes(profile.source, *times)
        except (ConfigError, ValueError) as error:
            notes.append(f"left out {path.name}: not readable ({' '.join(str(error).split())})")
    try:
        if changes := [describe_change(row) for row in folder.layouts()]:
            trace.attributes["layouts"] = changes
            notes += changes
    except ConfigError as error:
        notes.append(
            f"left out {folder.layouts_json.name}: not readable ({' '.join(str(error).split())})"
        )
    return notes


def find_runs(names: Sequence[str], runs_dir: Path) -> list[Path]:
    """Return the run folders and trace files for `names`, each once.

    A name is a path, or the name of a run or a study in `runs_dir`; a run's name without its
    signature selects all runs of that name. A study selects its points that have a trace.

    Raises:
        ConfigError: A name matches nothing, or no point of a study has a trace.
    """
    return list(dict.fromkeys(path for name in names for path in _named(name, runs_dir)))


def default_out(names: Sequence[str], runs: Sequence[Path], runs_dir: Path) -> Path:
    """Return the default path of the report.

    It is report.html in the folder of the only named run or study, or else next to the first run.
    """
    if len(names) == 1:
        for folder in (Path(names[0]), runs_dir / names[0]):
            if folder.is_dir():
                return folder / "report.html"
    first = runs[0]
    if len(runs) == 1 and first.is_dir():
        return first / "report.html"
    is_named_run = first.name == WHOLE_TRACE or first.is_dir()
    return first.resolve().parent / ("report.html" if is_named_run else f"{first.stem}-report.html")


def _named(name: str, runs_dir: Path) -> Iterator[Path]:
    for path in (Path(name), runs_dir / name):
        if path.is_file() or (path.is_dir() and _is_run(path)):
            yield path
            return
        if _is_study(path):
            yield from _points(path)
            return
    problem = f"is no run, no study and no trace file, here or in {runs_dir}"
    yield from runs_of_name(
        name, runs_dir, _is_run, _is_study, problem, "another folder of runs: --runs-dir FOLDER"
    )


def _points(study: Path) -> Iterator[Path]:
    try:
        rows = read_json(study / STUDY_JSON).get("points")
    except ValueError as error:
        raise ConfigError("study", study, f"its {STUDY_JSON} is damaged ({error})") from error
    names = (
        [row.get("run_folder") for row in rows if isinstance(row, dict)]
        if isinstance(rows, list)
        else []
    )
    folders = [
        study.parent / name for name in names if isinstance(name, str) and name and "/" not in name
    ]
    finished = [folder for folder in folders if (folder / WHOLE_TRACE).is_file()]
    if not finished:
        raise ConfigError(
            "study", study.name, "none of its points has a trace", f"make study CONF={study.name}"
        )
    yield from finished


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("run.yaml", WHOLE_TRACE)) or any(
        path.glob(PARTS)
    )


def _is_study(path: Path) -> bool:
    return (path / STUDY_JSON).is_file()

"""Find the runs and studies of a folder, or those that a command line names, and their status.

The record of a study has its points, the command that runs them, and whether it was cancelled. It is
in the same folder as the study's pictures.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems.errors import ConfigError
from gems.runs.folder import CANCELLED_JSON, RunFolder
from gems.runs.lookup import folders, runs_of_name
from gems.runs.owner import is_alive_here
from gems.utils.atomic_io import write_json
from gems.utils.process_tree import start_time
from gems.utils.units import now_utc
from jobs.status.job_record import read_or_empty
from jobs.status.run_status import RunStatus, run_statuses


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """The folder of a study, `runs_dir/<study>/`; the run folders of its points are next to it."""

    path: Path

    @property
    def name(self) -> str:
        """The study's name."""
        return self.path.name

    @property
    def study_json(self) -> Path:
        """The points, and the process that runs them."""
        return self.path / "study.json"

    @property
    def cancelled_json(self) -> Path:
        """Who cancelled the study."""
        return self.path / CANCELLED_JSON

    @property
    def is_cancelled(self) -> bool:
        """Whether the study was cancelled since its command was last called."""
        return self.cancelled_json.exists()

    def begin(self, points: Sequence[tuple[str, Path]]) -> None:
        """Record that this process runs `points`, and remove an earlier cancellation.

        `points` are labels and run folders. Points of earlier calls, which had other overrides,
        stay as long as their folders exist.

        Raises:
            ConfigError: The folder cannot be written.
        """
        now = {path.name: label for label, path in points}
        earlier = {
            folder.path.name: label for label, folder in self.points() if folder.run_yaml.exists()
        }
        rows = [{"point": label, "run_folder": folder} for folder, label in (earlier | now).items()]
        pid = os.getpid()
        process = {"pid": pid, "pid_started": start_time(pid), "host": os.uname().nodename}
        try:
            write_json(self.study_json, {"study": self.name, **process, "points": rows})
            self.cancelled_json.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                "runs_dir", self.path.parent, f"cannot write there ({error.strerror})"
            ) from error

    def points(self) -> tuple[tuple[str, RunFolder], ...]:
        """Return the labels and run folders of the points, whether or not the folders exist."""
        return tuple(
            (row["point"], RunFolder(self.path.parent / row["run_folder"]))
            for row in self.read().get("points", ())
        )

    def read(self) -> dict[str, Any]:
        """Read study.json: the points and the process that runs them.

        A damaged file counts as empty.
        """
        return read_or_empty(self.study_json)

    def is_running_here(self) -> bool | None:
        """Return whether the study's command is alive; None if it was called on another host."""
        record = self.read()
        return is_alive_here(record) if "pid" in record else False

    def mark_cancelled(self) -> None:
        """Ask the study's command to start no more points; it looks before each point.

        Raises:
            ConfigError: The mark cannot be written.
        """
        try:
            write_json(self.cancelled_json, requested_by())
        except OSError as error:
            raise ConfigError(
                "study", self.name, f"cannot write there ({error.strerror})"
            ) from error


def requested_by() -> dict[str, Any]:
    """Return who requests a cancellation, and when."""
    return {"uid": os.getuid(), "host": os.uname().nodename, "utc": now_utc()}


RUNS_DIR = "runs_dir="


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Runs, and studies with their own runs.

    A point of a study is among `runs` only if it was named.
    """

    runs: tuple[RunFolder, ...]
    studies: tuple[StudyRecord, ...]


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """The status of a study: its points in order, including missing ones."""

    record: StudyRecord
    points: tuple[tuple[str, RunStatus], ...]

    @property
    def counts(self) -> Counter[str]:
        """The number of points in each state."""
        return Counter(run.state for _, run in self.points)

    @property
    def is_active(self) -> bool:
        """Whether a point waits or runs, or the study's command is alive and will start more."""
        return any(run.is_active for _, run in self.points) or bool(self.record.is_running_here())

    @property
    def state(self) -> str:
        """The state of the whole study."""
        counts = self.counts
        if self.is_active:
            return "running"
        if len(counts) == 1:
            return next(iter(counts))
        return next(
            (state for state in ("failed", "lost", "cancelled") if counts[state]), "incomplete"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the study and its points as a dictionary for programs."""
        points = [{"point": label, **run.to_dict()} for label, run in self.points]
        return {
            "name": self.record.name,
            "state": self.state,
            "counts": dict(self.counts),
            "points": points,
        }


@dataclass(frozen=True, slots=True)
class Overview:
    """The status of runs and studies, and the errors of SLURM's commands."""

    runs: tuple[RunStatus, ...]
    studies: tuple[StudyStatus, ...]
    errors: tuple[str, ...]

    @property
    def is_active(self) -> bool:
        """Whether anything waits or runs."""
        return any(run.is_active for run in self.runs) or any(
            study.is_active for study in self.studies
        )

    def all_runs(self) -> tuple[RunStatus, ...]:
        """Return the runs and the points of the studies; each folder appears once."""
        points = [run for study in self.studies for _, run in study.points]
        return tuple({run.folder.path: run for run in (*self.runs, *points)}.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the overview as a dictionary for programs."""
        runs = [run.to_dict() for run in self.runs]
        studies = [study.to_dict() for study in self.studies]
        return {"runs": runs, "studies": studies, "query_errors": self.errors}


def overview(catalogue: Catalogue) -> Overview:
    """Return the status of a catalogue's runs and studies, with one query to SLURM for all."""
    points = [study.points() for study in catalogue.studies]
    every = (*catalogue.runs, *(folder for rows in points for _, folder in rows))
    statuses = run_statuses(list({folder.path: folder for folder in every}.values()))
    by_path = {run.folder.path: run for run in statuses.runs}
    studies = tuple(
        StudyStatus(study, tuple((label, by_path[folder.path]) for label, folder in rows))
        for study, rows in zip(catalogue.studies, points, strict=True)
    )
    return Overview(
        tuple(by_path[folder.path] for folder in catalogue.runs), studies, statuses.errors
    )


def find_runs(words: Sequence[str], *, allows_several: bool = True) -> Catalogue:
    """Find the runs and studies that `words` name: paths, or names below `runs_dir=` (runs).

    Return all if `words` names none. A run's name without its ID means all runs of that name, or
    the only one.

    Raises:
        ConfigError: A name matches no run, or several runs if only one is allowed.
    """
    runs_dir, names = split_runs_dir(words)
    if not names:
        entries = sorted(folders(runs_dir))
        found_studies = tuple(StudyRecord(path) for path in entries if _is_study(path))
        points = {folder.path for study in found_studies for _, folder in study.points()}
        alone = (RunFolder(path) for path in entries if _is_run(path) and path not in points)
        return Catalogue(tuple(alone), found_studies)
    runs: dict[Path, RunFolder] = {}
    studies: dict[Path, StudyRecord] = {}
    for name in names:
        places = (runs_dir / name, Path(name).resolve())
        path = next((place for place in places if _is_run(place) or _is_study(place)), None)
        if path is not None:
            if _is_run(path):
                runs[path] = RunFolder(path)
            else:
                studies[path] = StudyRecord(path)
            continue
        problem = f"is no run and no study of {runs_dir}"
        advice = "another folder of runs: runs_dir=FOLDER"
        same = runs_of_name(name, runs_dir, _is_run, _is_study, problem, advice)
        if len(same) > 1 and not allows_several:
            raise ConfigError(
                "run", name, "names several runs", ", ".join(path.name for path in same)
            )
        runs |= {each: RunFolder(each) for each in same}
    return Catalogue(tuple(runs.values()), tuple(studies.values()))


def find_named(words: Sequence[str], verb: str) -> Catalogue:
    """Find the runs and studies that `words` name.

    Raises:
        ConfigError: None is named, or one does not exist.
    """
    if not split_runs_dir(words)[1]:
        raise ConfigError(
            verb, "none", "name runs or studies", f"gems-jobs {verb} RUN_OR_STUDY ..."
        )
    return find_runs(words, allows_several=False)


def find_one_run(words: Sequence[str], verb: str) -> RunFolder:
    """Find the run that `words` name; raise ConfigError unless it is exactly one."""
    names = split_runs_dir(words)[1]
    if len(names) != 1:
        raise ConfigError(verb, " ".join(names) or "none", "takes one run", f"gems-jobs {verb} RUN")
    catalogue = find_runs(words, allows_several=False)
    if catalogue.studies:
        points = ", ".join(folder.path.name for _, folder in catalogue.studies[0].points())
        raise ConfigError(verb, names[0], "is a study", f"name one of its runs: {points}")
    return catalogue.runs[0]


def split_runs_dir(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the folder of the last `runs_dir=` (runs), and the other words."""
    folders = [word.removeprefix(RUNS_DIR) for word in words if word.startswith(RUNS_DIR)]
    return Path(folders[-1] if folders else "runs").resolve(), [
        w for w in words if not w.startswith(RUNS_DIR)
    ]


def _is_run(path: Path) -> bool:
    return os.path.isfile(RunFolder(path).run_yaml)


def _is_study(path: Path) -> bool:
    return os.path.isfile(StudyRecord(path).study_json)

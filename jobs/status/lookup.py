"""Find the runs and studies of a folder, or those that a command line names, and their status."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.lookup import folders, runs_of_name
from jobs.status.run_status import RunStatus, run_statuses
from jobs.status.study_record import StudyRecord

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
        ConfigError: a name matches no run, or several runs if only one is allowed.
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
        paths = (runs_dir / name, Path(name).resolve())
        if (
            found := next((path for path in paths if _is_run(path) or _is_study(path)), None)
        ) is not None:
            if _is_run(found):
                runs[found] = RunFolder(found)
            else:
                studies[found] = StudyRecord(found)
            continue
        problem = f"is no run and no study of {runs_dir}"
        advice = "another folder of runs: runs_dir=FOLDER"
        same = runs_of_name(name, runs_dir, _is_run, _is_study, problem, advice)
        if len(same) > 1 and not allows_several:
            raise ConfigError(
                "run", name, "names several runs", ", ".join(path.name for path in same)
            )
        runs |= {path: RunFolder(path) for path in same}
    return Catalogue(tuple(runs.values()), tuple(studies.values()))


def find_named(words: Sequence[str], verb: str) -> Catalogue:
    """Find the runs and studies that `words` name.

    Raises:
        ConfigError: none is named, or one does not exist.
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
    found = find_runs(words, allows_several=False)
    if found.studies:
        points = ", ".join(folder.path.name for _, folder in found.studies[0].points())
        raise ConfigError(verb, names[0], "is a study", f"name one of its runs: {points}")
    return found.runs[0]


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

"""The runs and studies of a folder: all of them, or those that a command line names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.lookup import folders, runs_of_name
from jobs.status.study_record import StudyRecord

RUNS_DIR = "runs_dir="


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Runs, and studies with runs of their own; a point of a study is among `runs` only if it was named."""

    runs: tuple[RunFolder, ...]
    studies: tuple[StudyRecord, ...]

    def folders(self) -> tuple[RunFolder, ...]:
        """Return the existing run folders, each once."""
        points = [folder for study in self.studies for _, folder in study.points() if os.path.isdir(folder.path)]
        return tuple({folder.path: folder for folder in (*self.runs, *points)}.values())


def find_runs(words: Sequence[str], *, allows_several: bool = True) -> Catalogue:
    """Find the runs and studies that `words` name: paths, or names below `runs_dir=` (runs); all if none is named.

    A run's name without its signature stands for all runs of that name, or for the only one.

    Raises:
        ConfigError: there is none of a name; or several runs where only one is allowed.
    """
    runs_dir, names = split_runs_dir(words)
    if not names:
        return _everything(runs_dir)
    runs: dict[Path, RunFolder] = {}
    studies: dict[Path, StudyRecord] = {}
    for name in names:
        found = _named(name, runs_dir, allows_several)
        if isinstance(found, StudyRecord):
            studies[found.path] = found
        else:
            runs.update({folder.path: folder for folder in found})
    return Catalogue(tuple(runs.values()), tuple(studies.values()))


def find_named(words: Sequence[str], verb: str) -> Catalogue:
    """Find the runs and studies that `words` name.

    Raises:
        ConfigError: nothing is named, or what is named does not exist.
    """
    if not split_runs_dir(words)[1]:
        raise ConfigError(verb, "none", "name runs or studies", f"python -m jobs {verb} RUN_OR_STUDY ...")
    return find_runs(words, allows_several=False)


def find_one_run(words: Sequence[str], verb: str) -> RunFolder:
    """Find the one run that `words` name.

    Raises:
        ConfigError: none, or more than one.
    """
    names = split_runs_dir(words)[1]
    if len(names) != 1:
        raise ConfigError(verb, " ".join(names) or "none", "takes one run", f"python -m jobs {verb} RUN")
    found = find_runs(words, allows_several=False)
    if found.studies:
        points = ", ".join(folder.path.name for _, folder in found.studies[0].points())
        raise ConfigError(verb, names[0], "is a study", f"name one of its runs: {points}")
    return found.runs[0]


def split_runs_dir(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the folder of the last `runs_dir=` (runs), and the other words."""
    folders = [word.removeprefix(RUNS_DIR) for word in words if word.startswith(RUNS_DIR)]
    return Path(folders[-1] if folders else "runs").resolve(), [w for w in words if not w.startswith(RUNS_DIR)]


def _everything(runs_dir: Path) -> Catalogue:
    entries = sorted(folders(runs_dir))
    studies = tuple(StudyRecord(path) for path in entries if _is_study(path))
    points = {folder.path for study in studies for _, folder in study.points()}
    return Catalogue(tuple(RunFolder(path) for path in entries if _is_run(path) and path not in points), studies)


def _named(name: str, runs_dir: Path, allows_several: bool) -> StudyRecord | list[RunFolder]:
    for path in (runs_dir / name, Path(name).resolve()):
        if _is_run(path):
            return [RunFolder(path)]
        if _is_study(path):
            return StudyRecord(path)
    problem, advice = f"is no run and no study of {runs_dir}", "another folder of runs: runs_dir=FOLDER"
    same = runs_of_name(name, runs_dir, _is_run, _is_study, problem, advice)
    if len(same) > 1 and not allows_several:
        raise ConfigError("run", name, "names several runs", ", ".join(path.name for path in same))
    return [RunFolder(path) for path in same]


def _is_run(path: Path) -> bool:
    return os.path.isfile(RunFolder(path).run_yaml)


def _is_study(path: Path) -> bool:
    return os.path.isfile(StudyRecord(path).study_json)

"""The runs and studies of a folder: all of them, or those that a command line names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gems.errors import ConfigError, nearest
from gems.runs.folder import RunFolder
from jobs.status.study_record import StudyRecord

RUNS_DIR = "runs_dir="
SIGNATURE_CHARS = 8


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Runs, and studies with runs of their own; a point of a study is not among `runs` unless it was named."""

    runs: tuple[RunFolder, ...]
    studies: tuple[StudyRecord, ...]

    def folders(self) -> tuple[RunFolder, ...]:
        """Return the run folders of everything that are there, each once."""
        of_studies = [folder for study in self.studies for _, folder in study.points() if os.path.isdir(folder.path)]
        return tuple({folder.path: folder for folder in (*self.runs, *of_studies)}.values())


def catalogue(words: Sequence[str], *, allows_several: bool = True) -> Catalogue:
    """Find the runs and studies that `words` name: paths, or names below `runs_dir=` (runs); all where none is named.

    A run's name without its signature stands for all runs of that name, or for the only one.

    Raises:
        ConfigError: there is none of a name; or several runs where only one may be meant.
    """
    runs_dir = Path("runs")
    for word in words:
        if word.startswith(RUNS_DIR):
            runs_dir = Path(word.removeprefix(RUNS_DIR))
    names = [word for word in words if not word.startswith(RUNS_DIR)]
    if not names:
        return _everything(runs_dir.resolve())
    runs: dict[Path, RunFolder] = {}
    studies: dict[Path, StudyRecord] = {}
    for name in names:
        found = _named(name, runs_dir.resolve(), allows_several)
        if isinstance(found, StudyRecord):
            studies[found.path] = found
        else:
            runs.update({folder.path: folder for folder in found})
    return Catalogue(tuple(runs.values()), tuple(studies.values()))


def one_run(words: Sequence[str], verb: str) -> RunFolder:
    """Find the one run that `words` name.

    Raises:
        ConfigError: none, or more than one.
    """
    names = [word for word in words if not word.startswith(RUNS_DIR)]
    if len(names) != 1:
        raise ConfigError(verb, " ".join(names) or "none", "takes one run", f"python -m jobs {verb} RUN")
    found = catalogue(words, allows_several=False)
    if found.studies:
        points = ", ".join(folder.path.name for _, folder in found.studies[0].points())
        raise ConfigError(verb, names[0], "is a study", f"name one of its runs: {points}")
    return found.runs[0]


def _everything(runs_dir: Path) -> Catalogue:
    entries = sorted(_entries(runs_dir))
    studies = tuple(StudyRecord(path) for path in entries if _is_study(path))
    of_studies = {folder.path for study in studies for _, folder in study.points()}
    runs = tuple(RunFolder(path) for path in entries if _is_run(path) and path not in of_studies)
    return Catalogue(runs, studies)


def _named(name: str, runs_dir: Path, allows_several: bool) -> StudyRecord | list[RunFolder]:
    for path in (runs_dir / name, Path(name).resolve()):
        if _is_run(path):
            return [RunFolder(path)]
        if _is_study(path):
            return StudyRecord(path)
    same = [RunFolder(path) for path in sorted(_entries(runs_dir)) if _is_run(path) and run_name(path) == name]
    if not same:
        known = [path.name for path in _entries(runs_dir) if _is_run(path) or _is_study(path)]
        advice = "nearest: " + ", ".join(nearest(name, known)) if known else "another folder of runs: runs_dir=FOLDER"
        raise ConfigError("run", name, f"is no run and no study of {runs_dir}", advice)
    if len(same) > 1 and not allows_several:
        raise ConfigError("run", name, "names several runs", ", ".join(folder.path.name for folder in same))
    return same


def _entries(runs_dir: Path) -> Iterator[Path]:
    """Yield the folders below `runs_dir`; others' that are closed to us count as none (as os.path sees them)."""
    try:
        yield from (path for path in runs_dir.iterdir() if os.path.isdir(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError("runs_dir", runs_dir, f"cannot be read ({error.strerror})") from error


def _is_run(path: Path) -> bool:
    return os.path.isfile(RunFolder(path).run_yaml)


def _is_study(path: Path) -> bool:
    return os.path.isfile(StudyRecord(path).study_json)


def run_name(path: Path) -> str:
    """Return the name of a run by its folder, whose name ends with the signature."""
    name, _, end = path.name.rpartition("-")
    return name if len(end) == SIGNATURE_CHARS else path.name

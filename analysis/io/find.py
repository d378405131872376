"""Runs by their names: folders, trace files, studies with all of their points, or names below the folder of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.io.load import PARTS, WHOLE_TRACE
from gems.errors import ConfigError
from gems.runs.lookup import runs_of_name
from gems.utils.atomic_io import read_json

RUN_YAML, STUDY_JSON = "run.yaml", "study.json"


def find_runs(names: Sequence[str], runs_dir: Path) -> list[Path]:
    """Return the run folders and trace files that `names` name, each once.

    A name is a path, or the name of a run or a study below `runs_dir`; a run's name without its signature stands for
    all runs of that name. Of a study those points are taken that have a trace.

    Raises:
        ConfigError: there is none of a name, or a study none of whose points has a trace.
    """
    found = dict.fromkeys(path for name in names for path in _named(name, runs_dir))
    return list(found)


def default_out(names: Sequence[str], runs: Sequence[Path], runs_dir: Path) -> Path:
    """Name the page: report.html in the folder of the one run or study that was named, else beside the first run."""
    if len(names) == 1:
        for folder in (Path(names[0]), runs_dir / names[0]):
            if folder.is_dir():
                return folder / "report.html"
    first = runs[0]
    if len(runs) == 1 and first.is_dir():
        return first / "report.html"
    return first.resolve().parent / (
        "report.html" if first.name == WHOLE_TRACE or first.is_dir() else f"{first.stem}-report.html"
    )


def _named(name: str, runs_dir: Path) -> Iterator[Path]:
    for path in (Path(name), runs_dir / name):
        if path.is_file() or (path.is_dir() and _is_run(path)):
            yield path
            return
        if _is_study(path):
            yield from _points(path)
            return
    problem = f"is no run, no study and no trace file, here or in {runs_dir}"
    yield from runs_of_name(name, runs_dir, _is_run, _is_study, problem, "another folder of runs: --runs-dir FOLDER")


def _points(study: Path) -> Iterator[Path]:
    try:
        rows = read_json(study / STUDY_JSON).get("points")
    except ValueError as error:
        raise ConfigError("study", study, f"its {STUDY_JSON} is damaged ({error})") from error
    names = [row.get("run_folder") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    folders = [study.parent / name for name in names if isinstance(name, str) and name and "/" not in name]
    finished = [folder for folder in folders if (folder / WHOLE_TRACE).is_file()]
    if not finished:
        raise ConfigError("study", study.name, "none of its points has a trace", f"make study CONF={study.name}")
    yield from finished


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (RUN_YAML, WHOLE_TRACE)) or any(path.glob(PARTS))


def _is_study(path: Path) -> bool:
    return (path / STUDY_JSON).is_file()

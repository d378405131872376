"""Find runs by name in a folder of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gems.errors import ConfigError, nearest

RUN_ID_CHARS = 8
RUN_YAML = "run.yaml"


def run_name(path: Path) -> str:
    """Return the name of a run: that of its folder without the run's ID."""
    name, _, run_id = path.name.rpartition("-")
    return name if len(run_id) == RUN_ID_CHARS else path.name


def folders(runs_dir: Path) -> Iterator[Path]:
    """Yield the folders in `runs_dir`, unordered, without those that this user may not enter.

    Raises:
        ConfigError: `runs_dir` cannot be read.
    """
    try:
        yield from (path for path in runs_dir.iterdir() if os.path.isdir(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError("runs_dir", runs_dir, f"cannot be read ({error.strerror})") from error


def runs_of_name(
    name: str,
    runs_dir: Path,
    is_run: Callable[[Path], bool],
    is_study: Callable[[Path], bool],
    problem: str,
    advice: str,
) -> list[Path]:
    """Return all runs in a folder that have a name, with any ID, sorted.

    Raises:
        ConfigError: There is none. `problem` describes the error; the nearest names follow, or
            `advice` if there are none.
    """
    entries = sorted(folders(runs_dir))
    same = [path for path in entries if is_run(path) and run_name(path) == name]
    if not same:
        known = [path.name for path in entries if is_run(path) or is_study(path)]
        raise ConfigError(
            "run", name, problem, "nearest: " + ", ".join(nearest(name, known)) if known else advice
        )
    return same


def find_run(word: str, runs_dir: Path = Path("runs")) -> Path:
    """Return the folder of a run, given by its path or its name, with or without its ID.

    Raises:
        ConfigError: There is no such run, or several have the name.
    """

    def is_run(path: Path) -> bool:
        return (path / RUN_YAML).is_file()

    for path in (Path(word), runs_dir / word):
        if is_run(path):
            return path
    advice = "give the folder of a run, or the name of one below runs/"
    runs = runs_of_name(word, runs_dir, is_run, lambda path: False, "is no run", advice)
    if len(runs) > 1:
        names = ", ".join(path.name for path in runs)
        raise ConfigError("run", word, f"names {len(runs)} runs: {names}", "give one of these")
    return runs[0]

"""Runs by their names below a folder of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gems.errors import ConfigError, nearest

RUN_ID_CHARS = 8
RUN_YAML = "run.yaml"


def run_name(path: Path) -> str:
    """Return the name of a run by its folder, whose name ends with the run's id."""
    name, _, end = path.name.rpartition("-")
    return name if len(end) == RUN_ID_CHARS else path.name


def folders(runs_dir: Path) -> Iterator[Path]:
    """Yield the folders below `runs_dir`, unordered.

    Those that we may not enter are left out (as by os.path).

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
    """Return all runs below a folder that have a name, whatever their ids, in order.

    Raises:
        ConfigError: there is none. `problem` describes that; the nearest names are given, or
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
    """Return the folder of one run.

    A path, or the name of a run below `runs_dir`, with or without its ID.

    Raises:
        ConfigError: there is none, or several have the name.
    """

    def is_run(path: Path) -> bool:
        return (path / RUN_YAML).is_file()

    for path in (Path(word), runs_dir / word):
        if is_run(path):
            return path
    advice = "give the folder of a run, or the name of one below runs/"
    found = runs_of_name(word, runs_dir, is_run, lambda path: False, "is no run", advice)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError("run", word, f"names {len(found)} runs: {names}", "give one of these")
    return found[0]

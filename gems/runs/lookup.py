"""Runs by their names below a folder of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gems.errors import ConfigError, nearest

RUN_ID_CHARS = 8


def run_name(path: Path) -> str:
    """Return the name of a run by its folder, whose name ends with the run's id."""
    name, _, end = path.name.rpartition("-")
    return name if len(end) == RUN_ID_CHARS else path.name


def folders(runs_dir: Path) -> Iterator[Path]:
    """Yield the folders below `runs_dir`, unordered; those that we may not enter are left out (as by os.path).

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
        ConfigError: there is none. `problem` describes that; the nearest names are given, or `advice` if there are
            none.
    """
    entries = sorted(folders(runs_dir))
    same = [path for path in entries if is_run(path) and run_name(path) == name]
    if not same:
        known = [path.name for path in entries if is_run(path) or is_study(path)]
        raise ConfigError("run", name, problem, "nearest: " + ", ".join(nearest(name, known)) if known else advice)
    return same

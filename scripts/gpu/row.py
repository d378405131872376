"""A row: one proof or measurement in its own processes with a time limit, and its outcome."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gems.launch.local_launcher import Output, rank_environment, run_ranks
from scripts.bench.rig import cause_of

Figures = list[dict[str, Any]]
Read = Callable[[Sequence[str]], Figures]
UNMEASURED = "unmeasured"
NOTES = (
    "failed",
    "refused",
    UNMEASURED,
    "torch_failed",
    "why",
)  # keys of a figure that say why it lacks others
MEASURED = "measured"
FAILED = "failed"
NOT_MEASURED = "not measured"
MIN_ROW_S = 15.0  # with less left no row is started
TIME_OVER = "time was over"


@dataclass(frozen=True, slots=True)
class Row:
    """One proof or measurement.

    Attributes:
        name: The name on the page and for `--only`.
        question: The question that it answers, in one line.
        program: the module and its arguments, as after `python -m`.
        limit_s: seconds until its processes are ended.
        environment: variables that it needs beside this process's.
        read: makes figures of the lines that it prints.
        columns: the figures that the page shows, in order, with spaces between; empty for all.
    """

    name: str
    question: str
    program: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    read: Read = field(default_factory=lambda: answer())
    columns: str = ""

    @property
    def command(self) -> str:
        """The command line that repeats it, without the paths of a machine."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "python", "-m", shlex.join(self.program)])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a row: figures, whose names end in their units, or why there are none."""

    status: str
    figures: Figures
    reason: str = ""
    wall_s: float = 0.0


def run(row: Row, limit_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run a row with these variables for at most `limit_s`, or its own limit if it is less."""
    limit_s = min(limit_s, row.limit_s)
    if limit_s < min(MIN_ROW_S, row.limit_s):
        return Outcome(NOT_MEASURED, [], TIME_OVER)
    lines: list[str] = []
    argv = [sys.executable, "-m", *row.program]
    variables = rank_environment(1) | dict(environment or {}) | dict(row.environment)
    begin_s = time.monotonic()
    ended = run_ranks(argv, variables, Output(None, False, lines.append), limit_s)
    wall_s = round(time.monotonic() - begin_s, 1)
    figures, unread = _read(row, lines)
    if ended.timed_out:
        return Outcome(FAILED, figures, _why(lines, f"did not end within {limit_s:.0f} s"), wall_s)
    if unread:
        return Outcome(FAILED, [], _why(lines, unread), wall_s)
    said = f"exit code {ended.returncode}" if ended.returncode else ""
    if all(UNMEASURED in figure for figure in figures):
        return Outcome(NOT_MEASURED, figures, figures[0][UNMEASURED], wall_s)
    why = [
        next((str(figure[note]) for note in NOTES[:2] if note in figure), "") for figure in figures
    ]
    if all(why) or any(figure.get("num_failed") for figure in figures):
        return Outcome(FAILED, figures, why[0] or said, wall_s)
    return Outcome(MEASURED, figures, said, wall_s)


def _read(row: Row, lines: Sequence[str]) -> tuple[Figures, str]:
    """Return the figures that a row printed, or the error."""
    try:
        return row.read(lines), ""
    except ValueError as error:
        return [], str(error)


def _why(lines: Sequence[str], otherwise: str) -> str:
    said = cause_of([line for line in lines if not line.startswith(("{", "[{"))])
    return f"{otherwise}: {said}" if said else otherwise


def answer(key: str = "") -> Read:
    """Return a reader of the JSON that a program prints last, below `key` if given.

    Each of `ways` becomes a figure. The reader raises ValueError if there is none.
    """

    def read(lines: Sequence[str]) -> Figures:
        for line in reversed(lines):
            if line.startswith(("{", "[")):
                try:
                    document = json.loads(line)
                except ValueError:
                    continue
                document = document[key] if key else document
                if document:
                    return [
                        flat
                        for item in (document if isinstance(document, list) else [document])
                        for flat in _flat(item)
                    ]
        raise ValueError("printed no answer")

    return read


def _flat(figure: dict[str, Any]) -> Figures:
    ways = figure.get("ways")
    rest = {name: value for name, value in figure.items() if name != "ways"}
    return (
        [rest]
        if ways is None
        else [{**rest, "way": way, **figures} for way, figures in ways.items()]
    )


def pytest_counts(lines: Sequence[str]) -> Figures:
    """Read how many tests passed.

    Raises:
        ValueError: Pytest did not come to its end.
    """
    text = "\n".join(lines)
    counts = {
        name: max(map(int, re.findall(rf"\b(\d+) {name}", text)), default=0)
        for name in ("passed", "failed")
    }
    errors = max(map(int, re.findall(r"\b(\d+) errors?\b", text)), default=0)
    if not any((*counts.values(), errors)):
        raise ValueError("no test ended")
    figure: dict[str, Any] = {
        "num_passed": counts["passed"],
        "num_failed": counts["failed"] + errors,
    }
    worst = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [figure | ({"failed": "; ".join(dict.fromkeys(worst))[:400]} if worst else {})]

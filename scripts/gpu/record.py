"""The file of results, one JSON line each: a row's figures, machine, time and command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from time import monotonic
from typing import Any

from gems.errors import ConfigError
from scripts.gpu.row import FAILED, Outcome, Row, run

SCHEMA = "gems.gpu/1"
KEYS = (
    "schema",
    "part",
    "row",
    "status",
    "figures",
    "reason",
    "command",
    "date",
    "commit",
    "hardware",
    "versions",
    "is_fake",
)
Line = dict[str, Any]


def run_part(
    part: int,
    rows: Sequence[Row],
    machine: Mapping[str, Any],
    out: Path | None,
    limit_s: float,
    side_by_side: int = 1,
) -> list[Line]:
    """Run rows in order within `limit_s` seconds, so many `side_by_side`.

    The line of each is appended to `out` as soon as it ended. Rows that would begin too late are
    recorded as not run. Profiles are kept for these rows alone. `machine` is where rows run, as
    `scripts.gpu.cases.facts` tells it.

    Raises:
        ConfigError: The file cannot be written.
    """
    end_s = monotonic() + limit_s
    one_at_a_time = Lock()

    def run_row(row: Row) -> Line:
        outcome = run(row, end_s - monotonic(), {"GEMS_CACHE_DIR": cache})
        with one_at_a_time:
            return _recorded(part, row, outcome, machine, out)

    with TemporaryDirectory() as cache, ThreadPoolExecutor(side_by_side) as pool:
        # one at a time in this thread, the only one in which a signal ends a row's processes
        return list((pool.map if side_by_side > 1 else map)(run_row, rows))


def _recorded(
    part: int, row: Row, outcome: Outcome, machine: Mapping[str, Any], out: Path | None
) -> Line:
    line = {
        "schema": SCHEMA,
        "part": part,
        "row": row.name,
        **asdict(outcome),
        "command": row.command,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        **machine,
    }
    if out is not None:
        append(out, line)
    _say(line)
    return line


def append(out: Path, line: Line) -> None:
    """Append a line to the file, which is made if it is not there.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise ConfigError(
            "--out", out, f"cannot be written ({error.strerror})", "choose another file"
        ) from error


def read_lines(path: Path) -> list[Line]:
    """Read the lines of a file, oldest first.

    Raises:
        ConfigError: It cannot be read, or a line is none of this schema.
    """
    try:
        texts = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--render", path, "cannot be read", "give the file that scripts/on_gpu.sh wrote"
        ) from error
    lines: list[Line] = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if (
            not isinstance(line, dict)
            or line.get("schema") != SCHEMA
            or any(key not in line for key in KEYS)
        ):
            raise ConfigError(
                "--render", f"{path}:{number}", f"is no line of {SCHEMA}", "remove the line"
            )
        lines.append(line)
    return lines


def _say(line: Line) -> None:
    """Print a line on stderr at once, for people."""
    mark = " (a device of host memory: no figure of a GPU)" if line["is_fake"] else ""
    head = f"{line['part']} {line['row']}: {line['status']}, {line['wall_s']:.0f} s{mark}"
    print(head + (f": {line['reason']}" if line["reason"] else ""), file=sys.stderr)
    for figure in line["figures"]:
        print(f"    {json.dumps(figure)}", file=sys.stderr)
    sys.stderr.flush()


def has_failed(lines: Sequence[Line]) -> bool:
    """Return whether a row failed; one for which no time was left has not."""
    return any(line["status"] == FAILED for line in lines)

"""The formats by name, and the file that each writes to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.export.perfetto import perfetto_pieces
from analysis.io.files import refuse_unwritable
from analysis.io.load import load_trace
from analysis.scaling.points import read_points
from gems.errors import ConfigError, one_of
from gems.trace import DTYPES, KINDS, STREAMS, Trace
from gems.utils.atomic_io import atomic_write

ROWS = 1 << 14  # of a piece
NAMES = {"kind": np.array(KINDS), "stream": np.array(STREAMS)}


def csv_pieces(trace: Trace) -> Iterator[str]:
    """Yield the head line, and then some thousand rows at a time, in the order of the trace."""
    columns = DTYPES["events"].names or ()
    yield ",".join(columns) + "\r\n"
    for first in range(0, len(trace.events), ROWS):
        part = trace.events[first : first + ROWS]
        shown = [(NAMES[name][part[name]] if name in NAMES else part[name]).tolist() for name in columns]
        yield "".join(",".join(map(str, row)) + "\r\n" for row in zip(*shown, strict=True))


def extrap_lines(runs: Sequence[Path]) -> Iterator[str]:
    """Yield `{"params": {"p": ranks}, "metric": "time", "callpath": "step", "value": seconds}` for each counted step.

    With several schedules, or runs of several sources, the callpath distinguishes them: `step->1f1b, simulated`.

    Raises:
        ConfigError: a run without a trace, or without a step after warm-up.
    """
    points = read_points(runs)
    lines = {(point.line, point.source) for point in points}
    for point in points:
        callpath = "step" if len(lines) == 1 else f"step->{point.line}, {point.source}"
        for seconds in point.step_s:
            measured = {"params": {"p": point.ranks}, "metric": "time", "callpath": callpath, "value": seconds}
            yield json.dumps(measured) + "\n"


OF_ONE_RUN: dict[str, tuple[str, Callable[[Trace], Iterator[str]]]] = {
    "perfetto": ("perfetto.json", perfetto_pieces),
    "csv": ("events.csv", csv_pieces),
}
EXTRAP, EXTRAP_FILE = "extrap", "extrap.jsonl"


@dataclass(frozen=True, slots=True)
class Export:
    """The file that was written, its format, and its size."""

    path: Path
    format: str
    size_bytes: int


def export_runs(runs: Sequence[Path], name: str, out: Path | None = None) -> Export:
    """Write an export piece by piece: `perfetto` and `csv` of one run, `extrap` of one or several.

    The default file is beside the trace, or of several runs beside the folder of the first.

    Raises:
        ConfigError: no such format, several runs for a format of one, a run that cannot be read, or a file that cannot
            be written.
    """
    if name == EXTRAP:
        first, file_name, pieces = runs[0].resolve(), EXTRAP_FILE, extrap_lines(runs)
    elif name not in OF_ONE_RUN:
        raise ConfigError("format", name, one_of((*OF_ONE_RUN, EXTRAP)))
    elif len(runs) != 1:
        raise ConfigError("export", f"{len(runs)} runs", f"{name} takes one run", "name one, or --format extrap")
    else:
        first, (file_name, write) = runs[0], OF_ONE_RUN[name]
        pieces = write(load_trace(first).trace)
    folder = first if first.is_dir() and len(runs) == 1 else first.parent
    path = out or folder / file_name
    with refuse_unwritable(path):
        with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            file.writelines(pieces)
        return Export(path, name, path.stat().st_size)

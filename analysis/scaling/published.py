"""Step times that others have published: tables of series, and folders of MLPerf's training results.

A table is a CSV with a row for each number of accelerators: series, accelerators, global_batch, and step_s or epoch_s
with train_samples; nodes, workload, accelerator, runs and source may be there, and lines that begin with `#` are notes.

MLPerf's logs have had three forms: of v0.5 (`:::MLPv0.5.0 resnet 1541.5 (a.py:7) train_epoch: 1`), of v0.6
(`:::MLL 1541.5 epoch_start: {"value": null, "metadata": {...}}`) and of later rounds (`:::MLLOG {"key": ...}`). A
result is a folder of `result_*.txt`, one of each run, in `results/SYSTEM/BENCHMARK` beside `systems/SYSTEM.json`.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.scaling.step_time import Row
from gems.errors import ConfigError, nearest

NEEDED = ("series", "accelerators", "global_batch")
NOT_VERIFIED = "not verified by MLCommons"
V05 = re.compile(r":::MLPv[\d.]+ \S+ (?P<time>[\d.]+) \([^)]*\) (?P<key>[\w.]+)(?:: (?P<value>.*))?")
V06 = re.compile(r":::MLL (?P<time>[\d.]+) (?P<key>[\w.]+): (?P<value>.*)")
V07 = re.compile(r":::MLLOG (?P<value>.*)")
FORMS = (":::MLLOG", ":::MLL ", ":::MLPv")
INTERVALS = {"epoch_start": "epoch_stop", "block_start": "block_stop"}
BATCH = ("global_batch_size", "input_batch_size")
SAMPLES = ("train_samples", "preproc_num_train_examples")


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of an MLPerf log; `epochs` is how many a block has."""

    key: str
    time_s: float
    value: Any
    epochs: int = 1


def read_table(path: Path) -> dict[str, list[Row]]:
    """Read a table, or all results below a folder, and return the rows of each series by accelerators.

    Raises:
        ConfigError: a file that cannot be read, or a row or log that lacks what a step's time needs.
    """
    found = _results(path) if path.is_dir() else _table(path)
    series: dict[str, list[Row]] = {}
    for name, row in found:
        series.setdefault(name, []).append(row)
    if not series:
        raise ConfigError("table", path, "has no row", "give a CSV of step times, or a folder of MLPerf's results")
    return {name: sorted(rows, key=lambda row: (row.accelerators, row.global_batch)) for name, rows in series.items()}


def choose_series(series: Mapping[str, list[Row]], name: str | None) -> dict[str, list[Row]]:
    """Return one of the series by its name, or all; raise ConfigError if there is none of that name."""
    if name is None:
        return dict(series)
    if name not in series:
        advice = f"allowed: {', '.join(series)}; nearest: {nearest(name, series, 1)[0]}"
        raise ConfigError("series", name, "is not in the table", advice)
    return {name: series[name]}


def _table(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("table", path, f"cannot be read ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    reader = csv.DictReader(line for _, line in numbered)
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            "table", path, f"has no column {', '.join(missing)}", f"needed: {', '.join(NEEDED)}, and times"
        )
    for (number, _), cells in zip(numbered[1:], reader, strict=False):
        yield str(cells["series"]), _row_of(path, number, cells)


def _row_of(path: Path, number: int, cells: Mapping[str, Any]) -> Row:
    def positive(name: str, is_needed: bool = True) -> float | None:
        text = (cells.get(name) or "").strip()
        if not text and not is_needed:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ConfigError("table", path, f"line {number}: {name} is {text or 'empty'!r}, and must be above 0")
        return value

    step_s = positive("step_s", False)
    if step_s is None and (not cells.get("epoch_s") or not cells.get("train_samples")):
        raise ConfigError("table", path, f"line {number} has neither step_s nor epoch_s with train_samples")
    ranks, batch = (int(positive(name) or 0) for name in NEEDED[1:])
    if step_s is None:
        step_s = _step_s(positive("epoch_s") or 0.0, positive("train_samples") or 0.0, batch)
    nodes = positive("nodes", False)
    return Row(ranks, batch, step_s, None if nodes is None else int(nodes), str(cells.get("source") or ""))


def _step_s(epoch_s: float, train_samples: float, global_batch: int) -> float:
    return epoch_s / math.ceil(train_samples / global_batch)


def _results(folder: Path) -> Iterator[tuple[str, Row]]:
    places = sorted({path.parent for path in folder.rglob("result_*.txt")})
    for place in places:
        system_json = place.parents[2] / "systems" / f"{place.parent.name}.json"
        nodes, ranks = _system(system_json)
        runs = [read_log(path) for path in sorted(place.glob("result_*.txt"))]
        batches = {batch for batch, _ in runs}
        if len(batches) > 1:
            raise ConfigError("table", place, f"has runs of different global batches ({sorted(batches)})")
        step_s = statistics.median(step_s for _, step_s in runs)
        yield place.name, Row(ranks, runs[0][0], step_s, nodes, f"{place}, {NOT_VERIFIED}")


def _system(path: Path) -> tuple[int, int]:
    """Return the nodes and the accelerators of a system, which its file may write as text."""
    try:
        document = json.loads(path.read_text())
        nodes, each = (int(document[name]) for name in ("number_of_nodes", "accelerators_per_node"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"says no number_of_nodes and accelerators_per_node ({type(error).__name__}: {error})"
        raise ConfigError("table", path, reason, "MLPerf keeps a system's file as systems/SYSTEM.json") from error
    return nodes, nodes * each


def read_log(path: Path) -> tuple[int, float]:
    """Read the log of one run and return its global batch and the median seconds of a step.

    Raises:
        ConfigError: the file cannot be read or has a broken line, or it tells no batch, samples or epochs.
    """
    entries = list(_entries(path))
    values = {entry.key: entry.value for entry in entries}
    found = []
    for what, keys in (("global batch", BATCH), ("training samples", SAMPLES)):
        value = next((values[key] for key in keys if key in values), None)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError("table", path, f"tells no {what} ({' or '.join(keys)})")
        found.append(value)
    epochs = _epochs_s(entries)
    if not epochs:
        raise ConfigError("table", path, "has no whole epoch (epoch_start, block_start or train_epoch)")
    return int(found[0]), _step_s(statistics.median(epochs), found[1], int(found[0]))


def _epochs_s(entries: Iterable[Entry]) -> list[float]:
    """Return the seconds of each epoch: by epochs, else by blocks of them, else from one train_epoch to the next."""
    by_key: dict[str, list[float]] = {}
    begun: dict[str, Entry] = {}
    marks = []
    for entry in entries:
        if entry.key in INTERVALS:
            begun[INTERVALS[entry.key]] = entry
        elif entry.key in begun:
            start = begun.pop(entry.key)
            by_key.setdefault(start.key, []).append((entry.time_s - start.time_s) / start.epochs)
        elif entry.key == "train_epoch":
            marks.append(entry.time_s)
    between = [after - before for before, after in pairwise(marks)]
    return next((found for key in INTERVALS if (found := by_key.get(key))), between)


def _entries(path: Path) -> Iterator[Entry]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError("table", path, f"cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        start = min((place for form in FORMS if (place := line.find(form)) >= 0), default=-1)
        if start < 0:
            continue
        try:
            yield _entry(line[start:])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("table", path, f"line {number} is no entry of an MLPerf log: {line[:60]!r}") from error


def _entry(line: str) -> Entry:
    if (found := V07.fullmatch(line)) is not None:
        document = json.loads(found["value"])
        return _with_metadata(str(document["key"]), float(document["time_ms"]) / 1e3, document)
    if (found := V06.fullmatch(line)) is not None:
        return _with_metadata(found["key"], float(found["time"]), json.loads(found["value"]))
    found = V05.fullmatch(line)
    if found is None:
        raise ValueError(line)
    text = found["value"]
    try:
        value = None if text is None else json.loads(text)
    except ValueError:
        value = text
    return Entry(found["key"], float(found["time"]), value)


def _with_metadata(key: str, time_s: float, document: Mapping[str, Any]) -> Entry:
    epochs = (document.get("metadata") or {}).get("epoch_count") or 1
    return Entry(key, time_s, document.get("value"), int(epochs))

"""Step times that others have published.

Tables of series, and folders of MLPerf's training results.
A table is a CSV with a row for each number of accelerators: series, accelerators, global_batch, and
step_s or epoch_s with train_samples; nodes, workload, accelerator, runs and source may be there,
and lines that begin with `#` are notes.

MLPerf's logs have had three forms: of v0.5 (`:::MLPv0.5.0 resnet 1541.5 (a.py:7) train_epoch: 1`),
of v0.6 (`:::MLL 1541.5 epoch_start: {"value": null, "metadata": {...}}`) and of later rounds
(`:::MLLOG {"key": ...}`). A result is a folder of `result_*.txt`, one of each run, in
`results/SYSTEM/BENCHMARK` beside `systems/SYSTEM.json`. Logs of submitters differ: several ranks
may write the same line, blocks overlap where evaluation runs beside training, and a stop may name
another epoch than its start. A result that does not give the time of a step is left out, with a
note.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.scaling.step_time import Row
from gems.errors import ConfigError, nearest

NEEDED = ("series", "accelerators", "global_batch")
NOT_VERIFIED = "not verified by MLCommons"
V05 = re.compile(
    r":::MLPv[\d.]+ \S+ (?P<time>[\d.]+) \([^)]*\) (?P<key>[\w.]+)(?: ?: (?P<value>.*))?"
)
V06 = re.compile(r":::MLL (?P<time>[\d.]+) (?P<key>[\w.]+): (?P<value>.*)")
V07 = re.compile(r":::MLLOG (?P<value>.*)")
FORMS = (":::MLLOG", ":::MLL ", ":::MLPv")
STOPS = {"epoch_stop": "epoch_start", "block_stop": "block_start"}
BATCH = ("global_batch_size", "input_batch_size")
SAMPLES = ("train_samples", "num_train_examples", "preproc_num_train_examples")
# Of the benchmarks' data sets, as logs of later rounds give them: most logs of v0.6 do not.
DATA_SET_SAMPLES = {"resnet": 1281167, "ssd": 117266}
WHOLE_RUN = "bert"  # the benchmark whose train_samples are those of the run
LEAST_STEP_S = 1e-9
MOST_STEP_S = 1e9
MOST_WHOLE = 2**31
MOST_SAMPLES = 2**53
# Files of systems are JSON with these names in one round, and logs with a Python dictionary inside
# in another.
NODES = re.compile(r"num(?:ber)?[_ ](?:of[_ ])?nodes\W+(\d{1,7})(?!\d)")
RANKS_PER_NODE = re.compile(r"(?:num_accelerators|accelerators_per_node)\W+(\d{1,7})(?!\d)")
ACCELERATOR = re.compile(r"\baccelerator(?:_model_name)?\W+([^\"'\\]+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of an MLPerf log; `epochs` is how many a block has, `number` that of the epoch or the block's first."""

    key: str
    time_s: float
    value: Any
    epochs: float = 1.0
    number: float | None = None


def read_table(path: Path, note: Callable[[str], None] = lambda _: None) -> dict[str, list[Row]]:
    """Read a table, or all results below a folder, and return the rows of each series by accelerators.

    A folder has a series for each benchmark, submitter and accelerator. Results that are left out
    go to `note`.

    Raises:
        ConfigError: a file that cannot be read, a row that lacks what a step's time needs, or a
            folder in which all results do.
    """
    found = _results(path, note) if path.is_dir() else _table(path)
    series: dict[str, list[Row]] = {}
    for name, row in found:
        series.setdefault(name, []).append(row)
    if not series:
        raise ConfigError(
            "table", path, "has no row", "give a CSV of step times, or a folder of MLPerf's results"
        )
    return {
        name: sorted(rows, key=lambda row: (row.accelerators, row.global_batch))
        for name, rows in series.items()
    }


def choose_series(series: Mapping[str, list[Row]], name: str | None) -> dict[str, list[Row]]:
    """Return the series of that name, else those whose names contain it in any case, or all.

    Raises:
        ConfigError: there is none.
    """
    if name is None or name in series:
        return dict(series) if name is None else {name: series[name]}
    found = {key: rows for key, rows in series.items() if name.lower() in key.lower()}
    if not found:
        advice = f"allowed: {'; '.join(series)}; nearest: {nearest(name, series, 1)[0]}"
        raise ConfigError("series", name, "is not in the table", advice)
    return found


def _table(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        lines = path.read_text(
            "utf-8-sig"
        ).splitlines()  # spreadsheets begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("table", path, f"cannot be read ({why})") from error
    numbered = [
        (number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    if not numbered:
        raise ConfigError("table", path, "is empty", f"needed: {', '.join(NEEDED)}, and times")
    reader = csv.reader((line for _, line in numbered), strict=True)
    read = 0
    try:
        names = [name.strip().lower() for name in next(reader)]
        _check_columns(path, names)
        read = reader.line_num
        for cells in reader:
            number = numbered[read][0]
            read = reader.line_num
            if any(cells[len(names) :]):
                raise ConfigError(
                    "table", path, f"line {number} has more cells than there are columns"
                )
            row = dict(zip(names, map(str.strip, cells), strict=False))
            if not row.get("series"):
                raise ConfigError("table", path, f"line {number} has no series")
            yield row["series"], _row_of(path, number, row)
    except csv.Error as error:
        raise ConfigError(
            "table", path, f"line {numbered[read][0]} is no line of a CSV ({error})"
        ) from error


def _check_columns(path: Path, names: Sequence[str]) -> None:
    missing = [name for name in NEEDED if name not in names]
    if missing:
        held = ", ".join(names)
        advice = (
            f"it has {textwrap.shorten(held, 200, placeholder=' ...')}; separate columns by commas"
        )
        raise ConfigError("table", path, f"has no column {', '.join(missing)}", advice)


def _row_of(path: Path, number: int, cells: Mapping[str, str]) -> Row:
    def refused(name: str, allowed: str) -> ConfigError:
        shown = textwrap.shorten(cells.get(name, ""), 40, placeholder="...") or "empty"
        return ConfigError(
            "table", path, f"line {number}: {name} is {shown!r}, and must be {allowed}"
        )

    def positive(name: str) -> float:
        try:
            value = float(cells.get(name, ""))
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise refused(name, "a number above 0, written as 1024 or 0.25")
        return value

    def whole(name: str) -> int:
        value = positive(name)
        if not value.is_integer() or value > MOST_WHOLE:
            raise refused(name, f"a whole number of at most {MOST_WHOLE}")
        return int(value)

    ranks, batch = (whole(name) for name in NEEDED[1:])
    if cells.get("step_s"):
        step_s = positive("step_s")
        if not LEAST_STEP_S <= step_s <= MOST_STEP_S:
            raise refused("step_s", f"from {LEAST_STEP_S:g} to {MOST_STEP_S:g}")
    elif cells.get("epoch_s") and cells.get("train_samples"):
        samples = positive("train_samples")
        if not 1 <= samples <= MOST_SAMPLES:
            raise refused("train_samples", f"from 1 to {MOST_SAMPLES}")
        step_s = _step_s(path, positive("epoch_s"), samples, batch, f"line {number}: ")
    else:
        raise ConfigError(
            "table", path, f"line {number} has neither step_s nor epoch_s with train_samples"
        )
    nodes = whole("nodes") if cells.get("nodes") else None
    return Row(ranks, batch, step_s, nodes, cells.get("source", ""))


def _step_s(
    path: Path, epoch_s: float, train_samples: float, global_batch: int, line: str = ""
) -> float:
    step_s = epoch_s / math.ceil(train_samples / global_batch)
    if not LEAST_STEP_S <= step_s <= MOST_STEP_S:
        allowed = f"{LEAST_STEP_S:g} to {MOST_STEP_S:g} s"
        raise ConfigError(
            "table",
            path,
            f"{line}an epoch of {epoch_s:g} s has steps of {step_s:g} s: allowed {allowed}",
        )
    return step_s


def _results(folder: Path, note: Callable[[str], None]) -> Iterator[tuple[str, Row]]:
    failures: list[ConfigError] = []
    count = 0
    for place in sorted({path.parent for path in folder.rglob("result_*.txt")}):
        try:
            rows = _result(place)
        except ConfigError as error:
            failures.append(error)
            continue
        count += len(rows)
        yield from rows
    if failures and not count:
        raise failures[0]
    for failure in failures:
        note(f"left out: {failure}")


def _result(place: Path) -> list[tuple[str, Row]]:
    """Return the series and the row of a result, the median over its runs.

    A row for each batch if they differ.
    """
    if len(place.parents) < 3 or ".." in place.parts:
        place = place.resolve()
    if len(place.parents) < 3:
        advice = "give the folder that holds results and systems"
        raise ConfigError("table", place, "is not results/SYSTEM/BENCHMARK", advice)
    steps: dict[int, list[float]] = {}
    for path in sorted(place.glob("result_*.txt")):
        batch, step_s = read_log(path)
        steps.setdefault(batch, []).append(step_s)
    nodes, ranks, accelerator = _system(place.parents[2] / "systems" / f"{place.parent.name}.json")
    name = f"{place.name}, {place.parents[2].resolve().name}, {accelerator}"
    where = f"{place}, {NOT_VERIFIED}"
    return [
        (name, Row(ranks, batch, statistics.median(runs), nodes, where))
        for batch, runs in steps.items()
    ]


def _system(path: Path) -> tuple[int, int, str]:
    """Return the nodes, the accelerators and the name of an accelerator of a system."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        advice = "MLPerf keeps the file of a system as systems/SYSTEM.json"
        raise ConfigError(
            "table", path, f"cannot be read ({type(error).__name__})", advice
        ) from error
    nodes, each = (
        0 if (found := name.search(text)) is None else int(found[1])
        for name in (NODES, RANKS_PER_NODE)
    )
    if not 0 < nodes * each <= MOST_WHOLE:
        raise ConfigError(
            "table", path, "does not give the nodes and accelerators of a system, each above 0"
        )
    named = ACCELERATOR.search(text)
    return nodes, nodes * each, "accelerator" if named is None else named[1].strip()


def read_log(path: Path) -> tuple[int, float]:
    """Read the log of one run and return its global batch and the median seconds of a step.

    The batch and the samples are those of the log's first lines about them; the samples of an epoch
    may be those of the benchmark that the folder is named after. A log of v0.5 may give the batch
    of one rank, and does not say so.

    Raises:
        ConfigError: the file cannot be read or has a broken line, or it tells no batch, samples or
        epochs.
    """
    entries = list(_entries(path))
    values = {entry.key: entry.value for entry in reversed(entries)}
    known = DATA_SET_SAMPLES.get(path.parent.name)
    batch = _number(path, values, BATCH, "global batch", None)
    samples = _number(path, values, SAMPLES, "training samples", known)
    epochs = _epochs_s(entries)
    if not epochs:
        raise ConfigError(
            "table", path, "has no whole epoch (epoch_start, block_start or train_epoch)"
        )
    if not all(0.0 < seconds < math.inf and count > 0.0 for seconds, count in epochs):
        raise ConfigError(
            "table", path, "has an epoch that does not end after its start", "remove this log"
        )
    if path.parent.name == WHOLE_RUN:
        epoch_s = sum(seconds * count for seconds, count in epochs)
    else:
        epoch_s = statistics.median(seconds for seconds, _ in epochs)
    return int(batch), _step_s(path, epoch_s, samples, int(batch))


def _number(
    path: Path, values: Mapping[str, Any], keys: Sequence[str], what: str, known: float | None
) -> float:
    value = next((values[key] for key in keys if key in values), known)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 1 <= value <= MOST_SAMPLES
    ):
        raise ConfigError("table", path, f"tells no {what} ({' or '.join(keys)})")
    return float(value)


def _epochs_s(entries: Iterable[Entry]) -> list[tuple[float, float]]:
    """Return the seconds of an epoch and how many they stand for.

    By epochs, else by blocks, else by train_epoch.
    A stop ends the start of its number, or the only one that is open. An epoch of v0.5 ends where
    evaluation begins. What is open where a run starts again was cut off.
    """
    found: dict[str, list[tuple[float, float]]] = {
        name: [] for name in (*STOPS.values(), "train_epoch")
    }
    begun: dict[str, dict[float | None, Entry]] = {name: {} for name in found}
    for entry in entries:
        if entry.key == "run_start":
            for cut_off in begun.values():
                cut_off.clear()
        if entry.key in ("train_epoch", "eval_start") and begun["train_epoch"]:
            start = begun["train_epoch"].popitem()[1]
            found["train_epoch"].append((entry.time_s - start.time_s, 1.0))
        if entry.key in begun:
            begun[entry.key].setdefault(entry.number, entry)
        open_ones = begun.get(STOPS.get(entry.key, ""), {})
        number = (
            entry.number
            if entry.number in open_ones or len(open_ones) != 1
            else next(iter(open_ones))
        )
        if number in open_ones:
            start = open_ones.pop(number)
            found[start.key].append(((entry.time_s - start.time_s) / start.epochs, start.epochs))
    return next((spans for spans in found.values() if spans), [])


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
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ConfigError(
                "table", path, f"line {number} is no entry of an MLPerf log: {line[:60]!r}"
            ) from error


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
    metadata = document.get("metadata") or {}
    number = metadata.get("first_epoch_num", metadata.get("epoch_num"))
    epochs = float(metadata.get("epoch_count") or 1)
    return Entry(
        key, time_s, document.get("value"), epochs, None if number is None else float(number)
    )

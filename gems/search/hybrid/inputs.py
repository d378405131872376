"""Inputs of the hybrid planner: epochs, scaling efficiency and speed-ups of model parallelism."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems.errors import ConfigError, one_of
from gems.search.hybrid.end_to_end_time import EfficiencyTable
from gems.search.hybrid.epochs import Epochs, EpochTable, NoiseFit, NoiseScale, fit_noise_scale
from gems.search.hybrid.quantity import Quantity

EPOCHS = "--epochs"
EFFICIENCY = "--efficiency"
SPEEDUP = "--speedup"
TABLE = "table"
NOISE_SCALE = "noise_scale"
# sources of a point, the most trustworthy first
SOURCES = ("measured", "emulated", "simulated")
MAX_DEGREE = 2**12
MAX_ROWS = 10_000
# relative difference up to which the batches of workers count as equal
SAME = 1e-6

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a command-line option; its methods raise ConfigErrors that name option and path."""

    option: str
    path: Path

    def error(self, allowed: str, advice: str = "") -> ConfigError:
        return ConfigError(self.option, self.path, allowed, advice)

    def document(self) -> dict[str, Any]:
        """Read a JSON object, or a CSV as one with its rows under `rows`."""
        try:
            text = self.path.read_text("utf-8-sig")  # spreadsheets write a byte order mark
            if self.path.suffix != ".json":
                lines = [line for line in text.splitlines() if not line.startswith("#")]
                return {"rows": list(csv.DictReader(lines, strict=True))}
            document = json.loads(text)
        except (OSError, ValueError, csv.Error, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise self.error(
                f"cannot be read ({why})", "give a .json or a .csv with a line of column names"
            ) from error
        if not isinstance(document, dict):
            raise self.error("must hold one JSON object")
        return document

    def rows(self, document: Mapping[str, Any], name: str) -> Sequence[Row]:
        """Return the rows of a document under a name, or under `rows`."""
        rows = document.get(name, document.get("rows"))
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise self.error(f"must hold rows, under {name} or rows in JSON")
        if len(rows) > MAX_ROWS:
            raise self.error(f"must hold at most {MAX_ROWS} rows")
        return rows

    def positive(self, row: Row, column: str) -> float:
        value = row.get(column)
        try:
            number = (
                float(value)
                if isinstance(value, int | float | str) and not isinstance(value, bool)
                else math.nan
            )
        except (ValueError, OverflowError):
            number = math.nan
        if not 1e-30 <= number <= 1e30:
            shown = "nothing" if value in (None, "") else repr(value)
            raise self.error(
                f"column {column} holds {shown} in a row, and must be a number above 0"
            )
        return number

    def whole(self, row: Row, column: str) -> int:
        number = self.positive(row, column)
        if number != int(number) or number > 2**31:
            raise self.error(
                f"column {column} holds {number:g} in a row, and must be a whole number"
            )
        return int(number)

    def quantity(self, row: Row, column: str, low: str = "low", high: str = "high") -> Quantity:
        """Return a number above 0 with the interval of its row, if there is one."""
        value = self.positive(row, column)
        if row.get(low) in (None, "") and row.get(high) in (None, ""):
            return Quantity.exact(value)
        ends = (self.positive(row, low), self.positive(row, high))
        try:
            return Quantity(value, *ends)
        except ValueError as error:
            raise self.error(f"column {column} {error}") from error


@dataclass(frozen=True, slots=True)
class GivenEpochs:
    """Epochs by global batch, as read from a file.

    `fit` is the fit of the noise scale, if it was fitted here, and `num_samples` the samples of an
    epoch, if the file has them.
    """

    law: Epochs
    fit: NoiseFit | None = None
    num_samples: int | None = None


def published_series(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Read the (global batch, epochs) runs of each series of a CSV.

    Raises:
        ConfigError: as `read_epochs`.
    """
    file = _File(EPOCHS, path)
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in file.rows(file.document(), "runs"):
        runs[str(row.get("series") or "")].append(
            (file.positive(row, "global_batch"), file.positive(row, "epochs"))
        )
    return runs


def _chosen_series(path: Path) -> tuple[Path, str | None]:
    """Split FILE:SERIES, unless there is a file of that whole name."""
    name, colon, series = str(path).rpartition(":")
    return (path, None) if path.exists() or not colon else (Path(name), series)


def read_epochs(path: Path) -> GivenEpochs:
    """Read epochs by global batch from a CSV or JSON file.

    If a CSV has a column series, `FILE:SERIES` chooses the one to which a noise scale is fitted.
    Otherwise it has the columns global_batch and epochs, and optionally low and high, the ends of a
    95 % interval; a JSON object has such rows under `runs`. Several rows for a batch are
    repetitions, which are averaged; their range is the interval. In JSON, `model` is table
    (`beyond: true` extrapolates it) or noise_scale, which is fitted to the runs or given by `e_min`
    and `b_crit`; `samples_per_epoch` is optional. Lines that begin with # are comments.

    Raises:
        ConfigError: the file cannot be read, a value is not a positive number, or the runs have no
            noise scale.
    """
    path, name = _chosen_series(path)
    file = _File(EPOCHS, path)
    document = file.document()
    if path.suffix != ".json" and any(row.get("series") for row in file.rows(document, "runs")):
        series = published_series(path)
        if name not in series:
            raise file.error(
                f"has the series {', '.join(series)}",
                f"choose one: {EPOCHS} {path}:{next(iter(series))}",
            )
        fit = fit_noise_scale(series[name])
        return GivenEpochs(fit.law, fit)
    if name is not None:
        raise file.error(f"has no column series to choose {name} from")
    num_samples = (
        file.whole(document, "samples_per_epoch") if "samples_per_epoch" in document else None
    )
    model = document.get("model", NOISE_SCALE if "e_min" in document else TABLE)
    if model not in (TABLE, NOISE_SCALE):
        raise file.error(f"model {model}: {one_of((TABLE, NOISE_SCALE))}")
    if "e_min" in document:
        e_min, b_crit = (
            file.quantity(document, name, f"{name}_low", f"{name}_high")
            for name in ("e_min", "b_crit")
        )
        return GivenEpochs(NoiseScale(e_min, b_crit), None, num_samples)
    rows = file.rows(document, "runs")
    if model == NOISE_SCALE:
        fit = fit_noise_scale(
            [(file.positive(row, "global_batch"), file.positive(row, "epochs")) for row in rows]
        )
        return GivenEpochs(fit.law, fit, num_samples)
    by_batch: dict[float, list[Quantity]] = defaultdict(list)
    for row in rows:
        by_batch[file.positive(row, "global_batch")].append(file.quantity(row, "epochs"))
    table = EpochTable.of(
        {batch: _pooled(repetitions) for batch, repetitions in by_batch.items()},
        document.get("beyond") is True,
    )
    return GivenEpochs(table, None, num_samples)


def _pooled(repetitions: Sequence[Quantity]) -> Quantity:
    mean = sum(repetition.value for repetition in repetitions) / len(repetitions)
    low = min(repetition.low for repetition in repetitions)
    high = max(repetition.high for repetition in repetitions)
    return Quantity(min(max(mean, low), high), low, high)


def read_efficiency(path: Path, schedule: str = "") -> tuple[EfficiencyTable, str]:
    """Read SE_N from a file; return it with its least trustworthy source, or "given".

    The file is the CSV or JSON of `analysis scaling`, or has the columns workers and efficiency,
    and optionally low, high and ways.

    In a scaling study, SE_N is the median step of the fewest replicas over that of N replicas, for
    pipelines with equal numbers of partitions and equal batches per replica; the fewest replicas
    count as lossless. If there are several schedules, the run's own is used; if a point has several
    sources, measured precedes emulated, and emulated precedes simulated.

    Raises:
        ConfigError: the file cannot be read, has no weak scaling, or has several schedules without
            that of the run.
    """
    file = _File(EFFICIENCY, path)
    rows = file.rows(file.document(), "points")
    known: dict[int, dict[int, Quantity]] = defaultdict(dict)
    if "efficiency" in rows[0]:
        for row in rows:
            degree = file.whole(row, "ways") if row.get("ways") not in (None, "") else 1
            known[degree][file.whole(row, "workers")] = file.quantity(row, "efficiency")
        return EfficiencyTable(dict(known)), "given"
    by_degree: dict[int, list[Row]] = defaultdict(list)
    for row in _rows_of_schedule(file, rows, schedule):
        by_degree[file.whole(row, "partitions")].append(row)
    sources = set()
    for degree, pipelines in sorted(by_degree.items()):
        table = _weak_scaling(file, pipelines)
        if len(table) > 1:
            known[degree] = {replicas: efficiency for replicas, (_, efficiency) in table.items()}
            sources |= {source for source, _ in table.values()}
    if not known:
        raise file.error(
            "must hold two numbers of replicas or more of pipelines of one length",
            "run a study of weak scaling over parallel.replicas",
        )
    return EfficiencyTable(dict(known)), SOURCES[max(sources)]


def _rows_of_schedule(file: _File, rows: Sequence[Row], schedule: str) -> Sequence[Row]:
    lines = [str(row.get("schedule", "")).split(", pipelines of ")[0] for row in rows]
    chosen = (
        lines
        if len(set(lines)) == 1
        else [line for line in lines if line.split(",")[0] == schedule]
    )
    if len(set(chosen)) != 1:
        schedules = ", ".join(sorted(set(lines)))
        raise file.error(f"must hold {schedule} once, or one schedule alone: it holds {schedules}")
    return [row for row, line in zip(rows, lines, strict=True) if line == chosen[0]]


def _weak_scaling(file: _File, rows: Sequence[Row]) -> dict[int, tuple[int, Quantity]]:
    """Return (index in SOURCES, SE_N) by replicas, for pipelines with the same partitions."""
    best: dict[int, tuple[int, float, float]] = {}
    for row in rows:
        replicas = file.whole(row, "replicas")
        source = str(row.get("source", SOURCES[-1]))
        if source not in SOURCES:
            raise file.error(f"source {source}: {one_of(SOURCES)}")
        batch = file.positive(row, "images_per_step") / replicas
        point = (SOURCES.index(source), batch, file.positive(row, "step_median_s"))
        best[replicas] = min(best.get(replicas, point), point)
    _, batch, base_s = best[min(best)]
    if any(abs(other / batch - 1.0) > SAME for _, other, _ in best.values()):
        raise file.error(
            "must be of weak scaling: the images of a step and replica change with the replicas",
            "keep parallel.micro_batches and parallel.micro_batch_size",
        )
    return {
        replicas: (source, Quantity.exact(base_s / step_s))
        for replicas, (source, _, step_s) in best.items()
    }


def read_speedups(text: str) -> Mapping[int, Quantity]:
    """Parse SU^M from `M:VALUE,...`, or, with its 95 % interval, `M:LOW:VALUE:HIGH,...`.

    Raises:
        ConfigError: the form is another one, a degree is below 2, or a speed-up is not positive.
    """
    speedups: dict[int, Quantity] = {}
    for word in text.split(","):
        try:
            first, *numbers = word.split(":")
            figures = [float(number) for number in numbers]
            low, value, high = figures if len(figures) == 3 else figures * 3
            degree = int(first)
            speedup = Quantity(value, low, high)
        except ValueError as error:
            raise ConfigError(
                SPEEDUP,
                text,
                "must be M:VALUE,... or M:LOW:VALUE:HIGH,...",
                "for example 2:1.32,4:1.9",
            ) from error
        if not 2 <= degree <= MAX_DEGREE or degree in speedups:
            raise ConfigError(
                SPEEDUP, text, f"must name each of its ways once, from 2 to {MAX_DEGREE}"
            )
        speedups[degree] = speedup
    return speedups


def epochs_json(epochs: GivenEpochs) -> dict[str, Any]:
    """Return the epochs as plain data."""
    law = epochs.law
    if isinstance(law, EpochTable):
        runs = [
            {
                "global_batch": batch,
                "epochs": quantity.value,
                "low": quantity.low,
                "high": quantity.high,
            }
            for batch, quantity in zip(law.global_batches, law.numbers, strict=True)
        ]
        return {"model": TABLE, "beyond": law.beyond, "runs": runs}
    answer: dict[str, Any] = {"model": NOISE_SCALE}
    for name, quantity in (("e_min", law.least_epochs), ("b_crit", law.critical_batch)):
        answer |= {name: quantity.value, f"{name}_low": quantity.low, f"{name}_high": quantity.high}
    if epochs.fit is not None:
        pairs = zip(epochs.fit.runs, epochs.fit.residuals, strict=True)
        answer["runs"] = [
            {"global_batch": run[0], "epochs": run[1], "residual": residual}
            for run, residual in pairs
        ]
    return answer

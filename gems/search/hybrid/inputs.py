"""What the hybrid planner is given on its command line.

Epochs, scaling efficiency, speed-ups of model parallelism.
"""

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
# The most real of what stands for one point, first.
SOURCES = ("measured", "emulated", "simulated")
MAX_DEGREE = 2**12
MAX_ROWS = 10_000
# A worker's batch counts as kept when it differs by less than this.
SAME = 1e-6

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _File:
    """A file that an option names, whose numbers are refused by that option and path.

    All of it raises ConfigError.
    """

    option: str
    path: Path

    def error(self, allowed: str, advice: str = "") -> ConfigError:
        return ConfigError(self.option, self.path, allowed, advice)

    def document(self) -> dict[str, Any]:
        """Read a JSON object, or a CSV as one with its rows under `rows`."""
        try:
            text = self.path.read_text(
                "utf-8-sig"
            )  # spreadsheets begin a file with a byte order mark
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
        """Return the rows that a document holds under a name, or under `rows`."""
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
        """Return a number above 0 with the interval of its row, or without one where the row has none."""
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
    """Epochs by global batch as a file gives them.

    `fit` is that of a noise scale that was fitted here, `num_samples` that of an epoch, where the
    file has it.
    """

    law: Epochs
    fit: NoiseFit | None = None
    num_samples: int | None = None


def published_series(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the (global batch, epochs) runs of each series of a CSV.

    Raise ConfigError as `read_epochs`.
    """
    file = _File(EPOCHS, path)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in file.rows(file.document(), "runs"):
        found[str(row.get("series") or "")].append(
            (file.positive(row, "global_batch"), file.positive(row, "epochs"))
        )
    return found


def _chosen_series(path: Path) -> tuple[Path, str | None]:
    """Split FILE:SERIES, unless there is a file of that whole name."""
    name, colon, series = str(path).rpartition(":")
    return (path, None) if path.exists() or not colon else (Path(name), series)


def read_epochs(path: Path) -> GivenEpochs:
    """Read epochs by global batch.

    Of a CSV with a column series, `FILE:SERIES` chooses one, to which a noise scale is fitted.
    Another CSV has columns global_batch and epochs, and may have low and high, the ends of a 95 %
    interval; a JSON object has such rows under `runs`. Several rows of one batch are repetitions:
    their mean counts, and their range is its interval. In JSON `model` chooses table (with `beyond:
    true` it goes on outside of its range) or noise_scale, which is fitted to the runs, or given by
    `e_min` and `b_crit`; `samples_per_epoch` may be there. Lines that begin with # are notes.

    Raises:
        ConfigError: a file that cannot be read, a number that is none, or runs without a noise
        scale.
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
        {batch: _pooled(each) for batch, each in by_batch.items()}, document.get("beyond") is True
    )
    return GivenEpochs(table, None, num_samples)


def _pooled(repetitions: Sequence[Quantity]) -> Quantity:
    mean = sum(each.value for each in repetitions) / len(repetitions)
    low = min(each.low for each in repetitions)
    high = max(each.high for each in repetitions)
    return Quantity(min(max(mean, low), high), low, high)


def read_efficiency(path: Path, schedule: str = "") -> tuple[EfficiencyTable, str]:
    """Read SE_N from a file; return also its source: the least real of what it stands on, or given.

    The file is what `analysis scaling` wrote (its CSV, or its JSON), or has the columns workers and
    efficiency (low, high, ways).

    Of a scaling study SE_N is the median step of the fewest replicas over that of N, for pipelines
    of equally many partitions and an equal batch of each replica; so the fewest replicas count as
    without loss. Of several schedules the run's own counts; of several sources for one point
    measured before emulated before simulated.

    Raises:
        ConfigError: a file that cannot be read, no weak scaling in it, or several schedules and
        none is the run's.
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
    kept = (
        lines
        if len(set(lines)) == 1
        else [line for line in lines if line.split(",")[0] == schedule]
    )
    if len(set(kept)) != 1:
        held = ", ".join(sorted(set(lines)))
        raise file.error(f"must hold {schedule} once, or one schedule alone: it holds {held}")
    return [row for row, line in zip(rows, lines, strict=True) if line == kept[0]]


def _weak_scaling(file: _File, rows: Sequence[Row]) -> dict[int, tuple[int, Quantity]]:
    """Return by replicas the index of the source in SOURCES and SE_N, of pipelines of one length."""
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
    """Read SU^M as `M:VALUE,...`, or with the ends of its 95 % interval `M:LOW:VALUE:HIGH`.

    Raises:
        ConfigError: another form, a degree below 2, or a speed-up that is no number above 0.
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


def epochs_json(given: GivenEpochs) -> dict[str, Any]:
    """Return the epochs that a plan is based on, as plain data."""
    law = given.law
    if isinstance(law, EpochTable):
        runs = [
            {"global_batch": batch, "epochs": each.value, "low": each.low, "high": each.high}
            for batch, each in zip(law.global_batches, law.numbers, strict=True)
        ]
        return {"model": TABLE, "beyond": law.beyond, "runs": runs}
    answer: dict[str, Any] = {"model": NOISE_SCALE}
    for name, each in (("e_min", law.least_epochs), ("b_crit", law.critical_batch)):
        answer |= {name: each.value, f"{name}_low": each.low, f"{name}_high": each.high}
    if given.fit is not None:
        pairs = zip(given.fit.runs, given.fit.residuals, strict=True)
        answer["runs"] = [
            {"global_batch": run[0], "epochs": run[1], "residual": residual}
            for run, residual in pairs
        ]
    return answer

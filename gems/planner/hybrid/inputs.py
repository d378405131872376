"""What the hybrid planner is given on its command line.

Epochs, scaling efficiency, and speed-ups of model parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems.errors import ConfigError, one_of
from gems.planner.hybrid.efficiency import EfficiencyTable
from gems.planner.hybrid.epochs import EpochTable, NoiseScale
from gems.planner.hybrid.noise_scale_fit import EpochRun, NoiseFit, fit_noise_scale
from gems.planner.hybrid.quantity import Quantity
from gems.planner.hybrid.tables import Row, positive, quantity, read_document, rows_of, whole

EPOCHS, EFFICIENCY, SPEEDUP = "--epochs", "--efficiency", "--speedup"
TABLE, NOISE_SCALE = "table", "noise_scale"
# The most real of what stands for one point, first.
SOURCES = ("measured", "emulated", "simulated")
MAX_WAYS = 2**12
# A worker's batch counts as kept when it differs by less than this.
SAME = 1e-6


@dataclass(frozen=True, slots=True)
class GivenEpochs:
    """Epochs as a file gives them.

    Attributes:
        law: by global batch.
        fit: where the law is a noise scale that was fitted here.
        num_samples: of an epoch, where the file says it.
    """

    law: EpochTable | NoiseScale
    fit: NoiseFit | None = None
    num_samples: int | None = None


def read_epochs(path: Path) -> GivenEpochs:
    """Read epochs by global batch.

    A CSV has columns global_batch and epochs, and may have low and high, the ends of a 95 % interval; a JSON object has
    such rows under `runs`. Several rows of one batch are repetitions: their mean counts, and their range is its
    interval. In JSON `model` chooses table (with `beyond: true` it goes on outside of its range) or noise_scale, which
    is fitted to the runs, or given by `e_min` and `b_crit`; `samples_per_epoch` may be there.

    Raises:
        ConfigError: a file that cannot be read, a number that is none, or runs without a noise scale.
    """
    document = read_document(EPOCHS, path)
    num_samples = whole(EPOCHS, path, document, "samples_per_epoch") if document.get("samples_per_epoch") else None
    model = document.get("model", NOISE_SCALE if "e_min" in document else TABLE)
    if model not in (TABLE, NOISE_SCALE):
        raise ConfigError(EPOCHS, path, f"model {model}: {one_of((TABLE, NOISE_SCALE))}")
    if "e_min" in document:
        law = NoiseScale(
            quantity(EPOCHS, path, document, "e_min", "e_min_low", "e_min_high"),
            quantity(EPOCHS, path, document, "b_crit", "b_crit_low", "b_crit_high"),
        )
        return GivenEpochs(law, None, num_samples)
    rows = rows_of(EPOCHS, path, document, "runs", "rows")
    if model == NOISE_SCALE:
        fit = fit_noise_scale(
            [
                EpochRun(positive(EPOCHS, path, row, "global_batch"), positive(EPOCHS, path, row, "epochs"))
                for row in rows
            ]
        )
        return GivenEpochs(fit.law, fit, num_samples)
    by_batch: dict[float, list[Quantity]] = defaultdict(list)
    for row in rows:
        by_batch[positive(EPOCHS, path, row, "global_batch")].append(quantity(EPOCHS, path, row, "epochs"))
    table = EpochTable.of({batch: _pooled(found) for batch, found in by_batch.items()}, document.get("beyond") is True)
    return GivenEpochs(table, None, num_samples)


def _pooled(found: Sequence[Quantity]) -> Quantity:
    """Return repetitions as one figure: their mean within their range."""
    mean = sum(each.value for each in found) / len(found)
    low, high = min(each.low for each in found), max(each.high for each in found)
    return Quantity(min(max(mean, low), high), low, high)


@dataclass(frozen=True, slots=True)
class GivenEfficiency:
    """Scaling efficiency as a file gives it; `source` is the least real of what it stands on, or given."""

    table: EfficiencyTable
    source: str


def read_efficiency(path: Path, schedule: str = "") -> GivenEfficiency:
    """Read SE_N from a file.

    The file is what `analysis scaling` wrote (its CSV, or its JSON), or has the columns workers and efficiency (low,
    high, ways).

    Of a scaling study SE_N is the median step of the fewest replicas over that of N, for pipelines of equally many
    partitions and an equal batch of each replica; so the fewest replicas count as without loss. Of several schedules
    the run's own counts; of several sources for one point measured before emulated before simulated.

    Raises:
        ConfigError: a file that cannot be read, no weak scaling in it, or several schedules and none is the run's.
    """
    document = read_document(EFFICIENCY, path)
    rows = rows_of(EFFICIENCY, path, document, "points", "rows")
    by_ways: dict[int, dict[int, Quantity]] = defaultdict(dict)
    if "efficiency" in rows[0]:
        for row in rows:
            ways = whole(EFFICIENCY, path, row, "ways") if row.get("ways") not in (None, "") else 1
            by_ways[ways][whole(EFFICIENCY, path, row, "workers")] = quantity(EFFICIENCY, path, row, "efficiency")
        return GivenEfficiency(EfficiencyTable(dict(by_ways)), "given")
    kept = _of_schedule(path, rows, schedule)
    lengths = [whole(EFFICIENCY, path, row, "partitions") for row in kept]
    known, sources = {}, set()
    for ways in sorted(set(lengths)):
        table = _weak(path, [row for row, length in zip(kept, lengths, strict=True) if length == ways])
        if len(table) > 1:
            known[ways] = {replicas: efficiency for replicas, (_, efficiency) in table.items()}
            sources |= {source for source, _ in table.values()}
    if not known:
        raise ConfigError(
            EFFICIENCY, path, "must hold two numbers of replicas or more of pipelines of one length",
            "run a study of weak scaling over parallel.replicas",
        )  # fmt: skip
    return GivenEfficiency(EfficiencyTable(known), SOURCES[max(sources)])


def _of_schedule(path: Path, rows: Sequence[Row], schedule: str) -> Sequence[Row]:
    lines = [str(row.get("schedule", "")).split(", pipelines of ")[0] for row in rows]
    kept = lines if len(set(lines)) == 1 else [line for line in lines if line.split(",")[0] == schedule]
    if len(set(kept)) != 1:
        raise ConfigError(
            EFFICIENCY,
            path,
            f"must hold {schedule} once, or one schedule alone: it holds {', '.join(sorted(set(lines)))}",
        )
    return [row for row, line in zip(rows, lines, strict=True) if line == kept[0]]


def _weak(path: Path, rows: Sequence[Row]) -> dict[int, tuple[int, Quantity]]:
    """Return by replicas the place of the source in SOURCES and SE_N, of pipelines of one length."""
    best: dict[int, tuple[int, float, float]] = {}
    for row in rows:
        replicas = whole(EFFICIENCY, path, row, "replicas")
        source = str(row.get("source", SOURCES[-1]))
        if source not in SOURCES:
            raise ConfigError(EFFICIENCY, path, f"source {source}: {one_of(SOURCES)}")
        batch = positive(EFFICIENCY, path, row, "images_per_step") / replicas
        found = (SOURCES.index(source), batch, positive(EFFICIENCY, path, row, "step_median_s"))
        best[replicas] = min(best.get(replicas, found), found)
    _, batch, base_s = best[min(best)]
    if any(abs(other / batch - 1.0) > SAME for _, other, _ in best.values()):
        raise ConfigError(
            EFFICIENCY, path, "must be of weak scaling: the images of a step and replica change with the replicas",
            "keep parallel.micro_batches and parallel.micro_batch_size",
        )  # fmt: skip
    return {replicas: (source, Quantity.exact(base_s / step_s)) for replicas, (source, _, step_s) in best.items()}


def speedups_of(text: str) -> Mapping[int, Quantity]:
    """Read SU^M as `M:VALUE,...`, or with the ends of its 95 % interval `M:LOW:VALUE:HIGH`.

    Raises:
        ConfigError: another form, ways below 2, or a speed-up that is no number above 0.
    """
    found: dict[int, Quantity] = {}
    for word in text.split(","):
        try:
            ways, *numbers = word.split(":")
            figures = [float(number) for number in numbers]
            low, value, high = figures if len(figures) == 3 else figures * 3
            number_of_ways, speedup = int(ways), Quantity(value, low, high)
        except ValueError as error:
            raise ConfigError(
                SPEEDUP, text, "must be M:VALUE,... or M:LOW:VALUE:HIGH,...", "for example 2:1.32,4:1.9"
            ) from error
        if not 2 <= number_of_ways <= MAX_WAYS or number_of_ways in found:
            raise ConfigError(SPEEDUP, text, f"must name each of its ways once, from 2 to {MAX_WAYS}")
        found[number_of_ways] = speedup
    return found


def epochs_json(given: GivenEpochs) -> dict[str, Any]:
    """Return what epochs a plan stands on, as plain data."""
    law = given.law
    if isinstance(law, EpochTable):
        return {
            "model": TABLE,
            "beyond": law.beyond,
            "runs": [
                {"global_batch": batch, "epochs": each.value, "low": each.low, "high": each.high}
                for batch, each in zip(law.global_batches, law.numbers, strict=True)
            ],
        }
    answer: dict[str, Any] = {"model": NOISE_SCALE}
    for name, each in (("e_min", law.least_epochs), ("b_crit", law.critical_batch)):
        answer |= {name: each.value, f"{name}_low": each.low, f"{name}_high": each.high}
    if given.fit is not None:
        answer["runs"] = [
            {"global_batch": run.global_batch, "epochs": run.epochs, "residual": residual}
            for run, residual in zip(given.fit.runs, given.fit.residuals, strict=True)
        ]
    return answer

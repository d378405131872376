"""Predictions of all rows of a table from a data sheet and one measured row.

The data sheet gives the rate of products, the multiprocessors and the links of a machine. The one
thing that it does not give, the share of the memory's rate that kernels reach, is what makes the
simulated step of the calibration row last as long as the measured one. No other row is read for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.outside.networks import boundaries_of, machine_of, overrides_of, settings_of
from analysis.outside.pipeline import Pipeline
from analysis.outside.table import Row, read_rows, row_named
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.partition.links import machine_links
from gems.profile.store import work_of
from gems.profile.subject import Subject
from gems.profile.work import ModelWork, Rates, work_at
from gems.utils.tables import RIGHT, table
from gems.utils.units import number

DEFAULT_MACHINE = "p40"
LEAST_SHARE, MOST_SHARE = 0.2, 1.0  # of the memory's rate
_STEPS = 20
_BATCH = 128  # of a row that states none: that of GPipe's table 1
_PER_PARTITION = 4  # micro-batches, with which GPipe's bubble is small (Huang et al., section 2.3)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Shares of a machine's rates that one measured row determines."""

    row: str
    machine: str
    memory_share: float
    compute_share: float


@dataclass(frozen=True)
class Networks:
    """The work of the networks of a table, each at two sizes of micro-batch."""

    rows: tuple[Row, ...]

    @cached_property
    def _works(self) -> dict[tuple[str, ...], tuple[ModelWork, ...]]:
        return {}

    def spec(self, row: Row, machine: str, size: int) -> RunSpec:
        """Return the run of a row's network on a machine.

        Raises:
            ConfigError: The network is unknown, or has no such form.
        """
        words = (f"machine={machine}", f"parallel.micro_batch_size={size}")
        return compose([*overrides_of(row), *words])

    def work(self, row: Row, machine: str, size: int) -> ModelWork:
        """Return the work of a row's network on micro-batches of a size."""
        key = (*overrides_of(row), machine)
        if key not in self._works:
            sizes = {size_of(other) for other in self.rows if overrides_of(other) == key[:-1]}
            self._works[key] = tuple(
                work_of(Subject.of(self.spec(row, machine, one)))
                for one in sorted({min(sizes), max(sizes)})
            )
        return work_at(self._works[key], size)


def size_of(row: Row) -> int:
    """Return the samples of a row's micro-batch, as stated or by the settings of its benchmark."""
    return -(-(row.batch or _BATCH) // micro_batches_of(row))


def micro_batches_of(row: Row) -> int:
    """Return the micro-batches of a row, as stated or by the settings of its benchmark.

    There are not more than samples.
    """
    return min(row.batch or _BATCH, settings_of(row)[1] or _PER_PARTITION * row.partitions)


@dataclass(frozen=True)
class Predictor:
    """The predictions of rows under a calibration."""

    networks: Networks
    calibration: Calibration

    def pipeline(self, row: Row) -> Pipeline:
        """Return a row's pipeline, on the calibrated machine unless it states another one.

        Raises:
            ConfigError: The network or its cut is unknown.
        """
        known = machine_of(row) or self.calibration.machine
        size = size_of(row)
        machine = self.networks.spec(row, known, size).machine
        shares = self.calibration
        rates = Rates(
            machine.flops_per_s * (machine.operator_efficiency or machine.efficiency),
            machine.memory_bytes_per_s,
            machine.launch_s,
            machine.operator_s,
            machine.half_rate_channels,
            machine.multiprocessors,
        )
        rates = replace(
            rates,
            flops_per_s=rates.flops_per_s * shares.compute_share,
            memory_bytes_per_s=rates.memory_bytes_per_s * shares.memory_share,
        )
        profile = self.networks.work(row, known, size).timed(rates)
        boundaries = boundaries_of(profile, settings_of(row)[0], row.partitions)
        links = machine_links(machine)
        return Pipeline(row, profile, boundaries, micro_batches_of(row), links)


def calibrated(networks: Networks, row: Row) -> Calibration:
    """Return the shares with which the simulated step of a row lasts as long as the measured one.

    The share of the memory's rate is between 0.2 and 1. If a step needs more or less than that, the
    share of both rates is what remains.
    """
    machine = machine_of(row) or DEFAULT_MACHINE

    def step_s(memory: float, compute: float) -> float:
        shares = Calibration(row.name, machine, memory, compute)
        return Predictor(networks, shares).pipeline(row).step_s

    assert row.step_s is not None
    memory = _solved(lambda share: step_s(share, 1.0), row.step_s, LEAST_SHARE, MOST_SHARE)
    rest = 1.0
    if memory in (LEAST_SHARE, MOST_SHARE):
        rest = _solved(lambda share: step_s(memory * share, share), row.step_s, 0.01, 100.0)
    return Calibration(row.name, machine, memory * rest, rest)


def _solved(time_s: Callable[[float], float], wanted_s: float, low: float, high: float) -> float:
    """Return the share with a time, which falls as the share grows; the nearest end if none has."""
    if time_s(low) <= wanted_s:
        return low
    if time_s(high) >= wanted_s:
        return high
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        if time_s(middle) > wanted_s:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def predict_table(path: Path, calibrate: str) -> dict[str, Any]:
    """Return the predictions of all rows of a table, calibrated with one of them.

    Raises:
        ConfigError: The table, the row or a network is unknown.
    """
    rows = read_rows(path)
    row = row_named(rows, calibrate)
    for other in rows:
        overrides_of(other)
    networks = Networks(tuple(rows))
    calibration = calibrated(networks, row)
    predictor = Predictor(networks, calibration)
    answers = [answer for other in rows for answer in _answers(predictor, other)]
    _relate(answers)
    return {
        "calibration": {
            "row": calibration.row,
            "machine": calibration.machine,
            "memory_share": calibration.memory_share,
            "compute_share": calibration.compute_share,
        },
        "rows": answers,
        "summary": _summary(answers, calibrate),
    }


def _answers(predictor: Predictor, row: Row) -> Iterable[dict[str, Any]]:
    try:
        pipeline = predictor.pipeline(row)
    except ConfigError as error:
        raise ConfigError(error.key, error.value, f"row {row.name}: {error.allowed}") from error
    shown = {"row": row.name, "source": row.source, "model": row.model, "samples": size_of(row)}
    shown |= {"partitions": row.partitions, "micro_batches": pipeline.micro_batches}
    if row.step_s is not None:
        answer = _compared("step_s", pipeline.step_s, row.step_s)
        yield shown | answer | {"parts": pipeline.parts}
    elif row.relative is not None:
        rate = size_of(row) * pipeline.micro_batches / pipeline.step_s
        yield shown | {"figure": "relative", "predicted": rate, "measured": row.relative}
    if row.memory_gib is not None:
        yield shown | _compared("memory_gib", pipeline.memory_gib, row.memory_gib)


def _compared(figure: str, predicted: float, measured: float) -> dict[str, Any]:
    error = predicted / measured - 1.0
    return {"figure": figure, "predicted": predicted, "measured": measured, "error": error}


def _relate(answers: Sequence[dict[str, Any]]) -> None:
    """Divide predicted rates by that of the first row of their source and network, its measure."""
    bases: dict[tuple[str, str], float] = {}
    for answer in answers:
        if answer["figure"] == "relative":
            key = (answer["source"], answer["model"])
            base = bases.setdefault(key, answer["predicted"] / answer["measured"])
            answer["predicted"] /= base
            answer["error"] = answer["predicted"] / answer["measured"] - 1.0


def _summary(answers: Sequence[dict[str, Any]], calibrate: str) -> dict[str, dict[str, float]]:
    """Return the median and the largest error of each figure, without the calibration row."""
    summary = {}
    for figure in dict.fromkeys(answer["figure"] for answer in answers):
        errors = [
            abs(answer["error"])
            for answer in answers
            if answer["figure"] == figure
            and not (answer["row"] == calibrate and figure == "step_s")
        ]
        if errors:
            summary[figure] = {
                "rows": len(errors),
                "median_error": statistics.median(errors),
                "worst_error": max(errors),
            }
    return summary


def outside_report(answer: dict[str, Any]) -> str:
    """Return the table of predictions beside measurements, and their errors."""
    columns = {
        "row": "",
        "model": "",
        "partitions": "d",
        "micro-batches": "d",
        "samples": "d",
        "figure": "",
        "measured": RIGHT,
        "predicted": RIGHT,
        "error [%]": RIGHT,
        "useful, recompute, link, idle [%]": RIGHT,
    }
    rows = [
        (
            *(row[name] for name in ("row", "model", "partitions", "micro_batches", "samples")),
            row["figure"],
            number(row["measured"]),
            number(row["predicted"]),
            f"{100 * row['error']:+.1f}",
            " ".join(f"{100 * share:.0f}" for share in row.get("parts", {}).values()) or "-",
        )
        for row in answer["rows"]
    ]
    shares = answer["calibration"]
    lines = [
        f"machine {shares['machine']}, calibrated with row {shares['row']}: "
        f"{shares['memory_share']:.0%} of the memory's rate, "
        f"{shares['compute_share']:.0%} of the rate of products"
    ]
    lines += [
        f"{figure}: {errors['rows']} rows, median error {errors['median_error']:.1%}, "
        f"worst {errors['worst_error']:.1%}"
        for figure, errors in answer["summary"].items()
    ]
    return "\n".join([table(columns, rows, title="predicted beside published"), *lines])

"""The closing table of a run, as text and as one object for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from analysis.attribution import attribute
from analysis.attribution.table import largest_line
from analysis.io.run_config import run_facts
from analysis.metrics.run_metrics import Metrics
from analysis.metrics.statistics import min_values
from gems.errors import ConfigError
from gems.trace import Trace
from gems.utils.tables import name_values
from gems.utils.units import UNKNOWN, Unit, bytes_unit, counted, number, percent, time_unit

MAX_RANK_ROWS = 16
SOURCE_NOTES = {"emulated": "real MPI, timed sleeps for compute", "simulated": "a prediction, nothing was run"}
COUNTED, PREDICTED = "peak_activation_bytes", "predicted_activation_bytes"
Row = tuple[str, str]


def summary_table(metrics: Metrics, trace: Trace, extra: Mapping[str, str]) -> str:
    """Return the closing table of a run: one figure a line, its unit in its name, `-` if it is unknown.

    The first line names the source of the figures. `extra` (file paths, say) is appended unchanged. The root attribute
    `validation_accuracy` is shown with the share of the majority class (`validation_majority`) for comparison. Both are
    fractions of 1.
    """
    rows = [
        *_speed_rows(metrics, trace.source),
        *_loss_row(trace),
        *_training_rows(metrics, trace),
        *_memory_rows(metrics),
        *_prediction_rows(trace),
        *extra.items(),
    ]
    shown = name_values(rows, title=_headline(trace))
    return shown if metrics.num_steps else f"{shown}\n  no figures of time: {_why_none(metrics)}"


def summary_dict(metrics: Metrics, trace: Trace) -> dict[str, Any]:
    """Return the same as plain data: units are in the names, lists have an item for each rank, null is unknown.

    Shares (bubble, validation accuracy) are fractions of 1. A loss that is not finite is null.
    """
    values = {**asdict(run_facts(trace)), **asdict(metrics)}
    for name in ("validation_accuracy", "validation_majority"):
        if name in trace.attributes:
            values[name] = trace.attributes[name]
    for name in (COUNTED, PREDICTED):
        if name in trace.attributes:
            values[name] = tuple(int(peak) for peak in trace.attributes[name])
    head = {"source": trace.source, "signature": trace.attributes.get("signature"), "world_size": trace.world_size}
    return {name: _plain(value) for name, value in {**head, **values}.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _headline(trace: Trace) -> str:
    facts = run_facts(trace)
    note = SOURCE_NOTES.get(trace.source)
    size = counted(trace.world_size, "rank")
    if facts.partitions and facts.replicas:
        size += f" ({counted(facts.partitions, 'partition')} x {counted(facts.replicas, 'replica')})"
    work = f", {counted(facts.micro_batches, 'micro-batch', 'es')} a step" if facts.micro_batches else ""
    source = trace.source + (f" ({note})" if note else "")
    return f"{facts.schedule or 'run'} on {size}{work}: {source}"


def _why_none(metrics: Metrics) -> str:
    if metrics.num_warmup_steps:
        return f"{counted(metrics.num_warmup_steps, 'step')} finished by every rank, warm-up only"
    return "no step was finished by every rank"


def _speed_rows(metrics: Metrics, source: str) -> list[Row]:
    unit = time_unit([metrics.step_p95_s])
    left_out = f" ({counted(metrics.num_warmup_steps, 'warm-up step')} left out)" if metrics.num_warmup_steps else ""
    return [
        ("steps", f"{metrics.num_steps}{left_out}"),
        ("images/s", UNKNOWN if metrics.images_per_s is None else number(metrics.images_per_s)),
        (f"step time, median [{unit.name}]", unit.show(metrics.step_median_s)),
        *_interval_row(metrics, unit),
        (f"step time, 95th percentile [{unit.name}]", unit.show(metrics.step_p95_s)),
        (f"bubble, {source} [%]", percent(metrics.bubble_measured)),
        ("bubble, by formula [%]", percent(metrics.bubble_formula)),
        *_recompute_row(metrics, source),
    ]


def _interval_row(metrics: Metrics, unit: Unit) -> list[Row]:
    """Return the interval of the median, or the range of few steps; nothing if all steps are equal."""
    if metrics.step_low_s == metrics.step_high_s:
        return []
    name = "median's 95 % interval" if metrics.num_steps >= min_values() else "fastest to slowest"
    return [
        (f"step time, {name} [{unit.name}]", f"{unit.show(metrics.step_low_s)} to {unit.show(metrics.step_high_s)}")
    ]


def _recompute_row(metrics: Metrics, source: str) -> list[Row]:
    """Return the efficiency if it differs from 1 less the bubble, because part of the compute is recomputation."""
    bubble, efficiency = metrics.bubble_measured, metrics.efficiency
    if bubble is None or efficiency is None or abs(1.0 - bubble - efficiency) < 1e-6:
        return []
    return [(f"efficiency without recomputation, {source} [%]", percent(efficiency))]


def _loss_row(trace: Trace) -> list[Row]:
    """Return the three largest causes of loss; nothing if the trace lacks what the attribution needs."""
    try:
        return [("lost most to [% of the step]", largest_line(attribute(trace)))]
    except ConfigError:
        return []


def _training_rows(metrics: Metrics, trace: Trace) -> list[Row]:
    rows: list[Row] = []
    if metrics.loss_first is not None and metrics.loss_last is not None:
        rows.append(("training loss, first to last step", f"{metrics.loss_first:.4g} to {metrics.loss_last:.4g}"))
    accuracy = trace.attributes.get("validation_accuracy")
    if accuracy is not None:
        majority = trace.attributes.get("validation_majority")
        beside = "" if majority is None else f" (majority class {percent(float(majority))})"
        rows.append(("validation accuracy [%]", percent(float(accuracy)) + beside))
    return rows


def _memory_rows(metrics: Metrics) -> list[Row]:
    """Return a row for each of up to 16 ranks, else the extremes with their rank."""
    rows: list[Row] = []
    kinds = (
        ("device ledger", metrics.peak_device_bytes),
        ("driver", metrics.peak_driver_bytes),
        ("resident", metrics.peak_rss_bytes),
    )
    for name, peaks in kinds:
        known = [(rank, peak) for rank, peak in enumerate(peaks) if peak is not None]
        if not known:
            continue
        unit = bytes_unit(peak for _, peak in known)
        label = f"peak, {name} [{unit.name}]"
        if len(known) == 1 or len({peak for _, peak in known}) == 1:
            ranks = f"rank {known[0][0]}" if len(known) == 1 else f"all {len(known)} ranks"
            rows.append((label, f"{unit.show(known[0][1])} on {ranks}"))
        elif len(known) <= MAX_RANK_ROWS:
            rows += [(f"{label}, rank {rank}", unit.show(peak)) for rank, peak in known]
        else:
            rows += _extreme_rows(label, known, unit.show)
    return rows or [("peak, device ledger", UNKNOWN)]


def _prediction_rows(trace: Trace) -> list[Row]:
    """Return the most activations that a rank held, beside the schedule's prediction for it."""
    counted_bytes, predicted = (trace.attributes.get(name) for name in (COUNTED, PREDICTED))
    if counted_bytes is None or predicted is None or not max(map(int, counted_bytes), default=0):
        return []
    rank = max(range(len(counted_bytes)), key=lambda r: int(counted_bytes[r]))
    unit = bytes_unit([int(counted_bytes[rank])])
    beside = f"(predicted {unit.show(int(predicted[rank]))}) on rank {rank}"
    return [(f"peak, activations [{unit.name}]", f"{unit.show(int(counted_bytes[rank]))} {beside}")]


def _extreme_rows(label: str, known: Sequence[tuple[int, int]], show: Any) -> list[Row]:
    by_peak = sorted(known, key=lambda pair: (pair[1], -pair[0]))
    return [
        (f"{label}, {which} of {len(known)} ranks", f"{show(peak)} on rank {rank}")
        for which, (rank, peak) in (("highest", by_peak[-1]), ("lowest", by_peak[0]))
    ]

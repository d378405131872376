"""The closing table of a run, as text and as one object for JSON."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from analysis.attribution.causes import attribute, largest_line
from analysis.io.run_config import run_facts
from analysis.metrics.run_metrics import Metrics
from analysis.metrics.statistics import MIN_VALUES
from gems.errors import ConfigError
from gems.trace import TIME_UNIT, Trace
from gems.utils.tables import name_values
from gems.utils.units import UNKNOWN, bytes_unit, counted, number, percent, time_unit

MAX_RANK_ROWS = 16
SOURCE_NOTES = {
    "emulated": "real MPI, timed sleeps for compute",
    "simulated": "a prediction, nothing was run",
}
COUNTED = "peak_activation_bytes"
PREDICTED = "predicted_activation_bytes"
Row = tuple[str, str]


def summary_table(metrics: Metrics, trace: Trace, extra: Mapping[str, str]) -> str:
    """Return the closing table of a run.

    One figure a line, its unit in its name, `-` if it is unknown.
    The first line names the source of the figures. `extra` (file paths, say) is appended unchanged.
    The root attribute `validation_accuracy` is shown with the share of the majority class
    (`validation_majority`) for comparison. Both are fractions of 1.
    """
    rows = [
        *_speed_rows(metrics, trace),
        *_training_rows(metrics, trace),
        *_memory_rows(metrics, trace),
        *extra.items(),
    ]
    shown = name_values(rows, title=_headline(trace))
    if metrics.num_steps:
        return shown
    why = "no step was finished by every rank"
    if metrics.num_warmup_steps:
        why = f"{counted(metrics.num_warmup_steps, 'step')} finished by every rank, warm-up only"
    return f"{shown}\n  no figures of time: {why}"


def summary_dict(metrics: Metrics, trace: Trace) -> dict[str, Any]:
    """Return the same as plain data.

    Units are in the names, lists have an item for each rank, null is unknown.
    Shares (bubble, validation accuracy) are fractions of 1. A loss that is not finite is null.
    """
    attributes = trace.attributes
    values = {
        "source": trace.source,
        "signature": attributes.get("signature"),
        "world_size": trace.world_size,
    }
    values |= {**asdict(run_facts(trace)), **asdict(metrics)}
    values |= {name: value for name, value in attributes.items() if name.startswith("validation_")}
    values |= {
        name: tuple(map(int, attributes[name]))
        for name in (COUNTED, PREDICTED)
        if name in attributes
    }
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _headline(trace: Trace) -> str:
    facts = run_facts(trace)
    note = SOURCE_NOTES.get(trace.source)
    size = facts.describe_ranks(trace.world_size)
    work = (
        f", {counted(facts.micro_batches, 'micro-batch', 'es')} a step"
        if facts.micro_batches
        else ""
    )
    source = trace.source + (f" ({note})" if note else "")
    return f"{facts.schedule or 'run'} on {size}{work}: {source}"


def _speed_rows(metrics: Metrics, trace: Trace) -> list[Row]:
    is_in_units = TIME_UNIT in trace.attributes
    source = trace.source
    unit = time_unit([metrics.step_p95_s], is_in_units)
    images = UNKNOWN if metrics.images_per_s is None else number(metrics.images_per_s)
    left_out = (
        f" ({counted(metrics.num_warmup_steps, 'warm-up step')} left out)"
        if metrics.num_warmup_steps
        else ""
    )
    rows = [
        ("steps", f"{metrics.num_steps}{left_out}"),
        *([] if is_in_units else [("images/s", images)]),
        (f"step time, median [{unit.name}]", unit.show(metrics.step_median_s)),
    ]
    if metrics.step_low_s != metrics.step_high_s:
        name = "median's 95 % interval" if metrics.num_steps >= MIN_VALUES else "fastest to slowest"
        bounds = f"{unit.show(metrics.step_low_s)} to {unit.show(metrics.step_high_s)}"
        rows.append((f"step time, {name} [{unit.name}]", bounds))
    rows += [
        (f"step time, 95th percentile [{unit.name}]", unit.show(metrics.step_p95_s)),
        (f"bubble, {source} [%]", percent(metrics.bubble_measured)),
        ("bubble, by formula [%]", percent(metrics.bubble_formula)),
    ]
    bubble = metrics.bubble_measured
    efficiency = metrics.efficiency
    if bubble is not None and efficiency is not None and abs(1.0 - bubble - efficiency) >= 1e-6:
        rows.append((f"efficiency without recomputation, {source} [%]", percent(efficiency)))
    if metrics.joules_per_image is not None:
        rows.append(("energy of the GPUs [J/image]", number(metrics.joules_per_image)))
    with contextlib.suppress(ConfigError):  # the trace lacks what the attribution needs
        rows.append(("lost most to [% of the step]", largest_line(attribute(trace))))
    return rows


# A validation metric, that of a constant predictor, the row's label, the note, the format.
VALIDATION: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    ("accuracy", "majority", "validation accuracy [%]", "majority class", percent),
    (
        "dice",
        "dice_constant",
        "validation Dice, mean of classes [%]",
        "constant predictor",
        percent,
    ),
    (
        "mean_absolute_error",
        "mean_absolute_error_constant",
        "validation mean absolute error",
        "always the mean",
        number,
    ),
)


def _training_rows(metrics: Metrics, trace: Trace) -> list[Row]:
    rows: list[Row] = []
    if metrics.loss_first is not None and metrics.loss_last is not None:
        rows.append(
            (
                "training loss, first to last step",
                f"{metrics.loss_first:.4g} to {metrics.loss_last:.4g}",
            )
        )
    for name, constant, label, beside, show in VALIDATION:
        value, other = (trace.attributes.get(f"validation_{key}") for key in (name, constant))
        if value is not None:
            note = "" if other is None else f" ({beside} {show(float(other))})"
            rows.append((label, show(float(value)) + note))
    return rows


def _memory_rows(metrics: Metrics, trace: Trace) -> list[Row]:
    """Return a row for each of up to 16 ranks, else the extremes, and the largest prediction."""
    rows: list[Row] = []
    for name, peaks in (
        ("device ledger", metrics.peak_device_bytes),
        ("reserved by the allocator", metrics.peak_reserved_bytes),
        ("driver", metrics.peak_driver_bytes),
        ("resident", metrics.peak_rss_bytes),
    ):
        known = [(peak, -rank) for rank, peak in enumerate(peaks) if peak is not None]
        if not known:
            continue
        unit = bytes_unit(peak for peak, _ in known)
        label, (most, least) = f"peak, {name} [{unit.name}]", (max(known), min(known))
        if most[0] == least[0]:
            ranks = f"rank {-most[1]}" if len(known) == 1 else f"all {len(known)} ranks"
            rows.append((label, f"{unit.show(most[0])} on {ranks}"))
        elif len(known) <= MAX_RANK_ROWS:
            rows += [(f"{label}, rank {-rank}", unit.show(peak)) for peak, rank in known]
        else:
            for which, (peak, rank) in (("highest", most), ("lowest", least)):
                rows.append(
                    (
                        f"{label}, {which} of {len(known)} ranks",
                        f"{unit.show(peak)} on rank {-rank}",
                    )
                )
    rows = rows or [("peak, device ledger", UNKNOWN)]
    counted, predicted = (trace.attributes.get(name) for name in (COUNTED, PREDICTED))
    if counted is not None and max(map(int, counted), default=0):
        rank = max(range(len(counted)), key=lambda rank: int(counted[rank]))
        unit = bytes_unit([int(counted[rank])])
        beside = "" if predicted is None else f"(predicted {unit.show(int(predicted[rank]))}) "
        rows.append(
            (
                f"peak, activations [{unit.name}]",
                f"{unit.show(int(counted[rank]))} {beside}on rank {rank}",
            )
        )
    return rows

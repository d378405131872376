"""Key figures of one run and its tables.

The tables cover ranks, stages, causes of lost time, and predictions with observations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis.attribution.causes import Attribution
from analysis.metrics.events import COMPUTE, of_kinds, place_numbers
from analysis.metrics.run_metrics import NS, Metrics, table_unit
from analysis.metrics.statistics import MIN_VALUES
from analysis.report.html import Cell, Table
from gems.trace import KINDS, TIME_UNIT, Trace
from gems.utils.units import MIB, UNITS, UNKNOWN, Unit, bytes_unit, number, time_unit

PEAKS = (
    ("activations", "predicted_activation_bytes", "peak_activation_bytes"),
    ("allocated", "peak_bytes", "peak_allocated_bytes"),
)
# events that are equal in these are the segments of one pass
PASS = ("stage", "kind", "micro_batch", "direction", "step", "rank")


class Figure(NamedTuple):
    """A figure of the headline: its name, its value with unit, and a line of detail."""

    name: str
    value: str
    detail: str = ""


def key_figures(metrics: Metrics, trace: Trace) -> list[Figure]:
    """Return the figures of a run's headline that the trace contains."""
    rate = (
        UNKNOWN
        if metrics.images_per_s is None or TIME_UNIT in trace.attributes
        else number(metrics.images_per_s)
    )
    figures = [
        Figure("images/s", rate, f"{metrics.num_images} images in {metrics.num_steps} steps"),
        _step_time(metrics, TIME_UNIT in trace.attributes),
        Figure("efficiency", _percent(metrics.efficiency), "useful compute over ranks x time"),
        Figure(
            "bubble",
            _percent(metrics.bubble_measured),
            f"by formula {_percent(metrics.bubble_formula)}",
        ),
        *_peaks(metrics),
        Figure("energy", _joules(metrics), "of the GPUs, by samples of their power"),
    ]
    if metrics.loss_first is not None and metrics.loss_last is not None:
        figures.append(
            Figure("training loss", f"{metrics.loss_last:.4g}", f"first {metrics.loss_first:.4g}")
        )
    accuracy, majority = (
        trace.attributes.get(f"validation_{name}") for name in ("accuracy", "majority")
    )
    if accuracy is not None:
        beside = "" if majority is None else f"majority class {_percent(float(majority))}"
        figures.append(Figure("validation accuracy", _percent(float(accuracy)), beside))
    return [figure for figure in figures if figure.value != UNKNOWN]


def overview_row(metrics: Metrics, trace: Trace) -> dict[str, Cell]:
    """Return the figures by which runs are compared, each in a fixed unit; None if unknown."""
    peaks = [peak for peak in metrics.peak_device_bytes if peak]
    unit = table_unit(trace)
    rate = {} if unit is UNITS else {"images/s": metrics.images_per_s}
    return {
        **rate,
        f"step, median [{unit.name}]": _scaled(metrics.step_median_s, 1 / unit.size),
        "efficiency [%]": _scaled(metrics.efficiency, 100),
        "bubble [%]": _scaled(metrics.bubble_measured, 100),
        "peak on a device [MiB]": max(peaks) / MIB if peaks else None,
        "energy [J/image]": metrics.joules_per_image,
        "last loss": metrics.loss_last,
    }


def _joules(metrics: Metrics) -> str:
    return (
        UNKNOWN
        if metrics.joules_per_image is None
        else f"{number(metrics.joules_per_image)} J/image"
    )


def _step_time(metrics: Metrics, is_in_units: bool) -> Figure:
    unit = time_unit([metrics.step_p95_s], is_in_units)
    bounds = ""
    low = metrics.step_low_s
    high = metrics.step_high_s
    if low is not None and high is not None and low < high:
        name = "95 % interval" if metrics.num_steps >= MIN_VALUES else "fastest to slowest"
        bounds = f"{name} {unit.show(low)} to {unit.show(high)}; "
    warm_up = f", {metrics.num_warmup_steps} warm-up left out" if metrics.num_warmup_steps else ""
    detail = (
        f"{bounds}95th percentile {_with_unit(metrics.step_p95_s, unit)}; {metrics.num_steps}"
        f" steps{warm_up}"
    )
    return Figure("step time, median", _with_unit(metrics.step_median_s, unit), detail)


def _peaks(metrics: Metrics) -> list[Figure]:
    found = []
    for name, peaks in (
        ("peak on a device", metrics.peak_device_bytes),
        ("reserved by the allocator", metrics.peak_reserved_bytes),
        ("peak by the driver", metrics.peak_driver_bytes),
        ("peak resident memory", metrics.peak_rss_bytes),
    ):
        known = [(peak, rank) for rank, peak in enumerate(peaks) if peak]
        if known:
            (most, rank), (least, _), unit = max(known), min(known), bytes_unit([max(known)[0]])
            found.append(
                Figure(
                    name, _with_unit(most, unit), f"rank {rank}; least {_with_unit(least, unit)}"
                )
            )
    return found


def _with_unit(value: float | None, unit: Unit) -> str:
    return UNKNOWN if value is None else f"{unit.show(value)} {unit.name}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def rank_table(name: str, metrics: Metrics, trace: Trace, causes: Attribution | None) -> Table:
    """Return a row for each rank.

    It has the host, time in compute and its share, peaks, and the lost time by cause if known.
    """
    hosts = trace.attributes.get("hostnames", ())
    unit = table_unit(trace)
    lost = (
        {}
        if causes is None
        else {f"{cause} [{unit.name}/step]": values for cause, values in causes.causes_s.items()}
    )
    peaks = (metrics.peak_device_bytes, metrics.peak_driver_bytes, metrics.peak_rss_bytes)
    rows: list[tuple[Cell, ...]] = [
        (
            rank,
            str(hosts[rank]) if rank < len(hosts) else None,
            busy_s,
            _scaled(busy_s, 100 / metrics.time_s) if metrics.time_s else None,
            *(_scaled(peak[rank], 1 / MIB) for peak in peaks),
            *(values[rank] / unit.size if rank < len(values) else None for values in lost.values()),
        )
        for rank, busy_s in enumerate(metrics.busy_s)
    ]
    columns = (
        "rank",
        "host",
        f"in compute [{'units' if unit is UNITS else 's'}]",
        "in compute [%]",
        "peak, ledger [MiB]",
        "peak, driver [MiB]",
        "peak, resident [MiB]",
        *lost,
    )
    return Table(
        name, f"Ranks, {trace.source}", columns, rows, (0, 0, 3, 1, 2, 1, 1, *(3 for _ in lost))
    )


def stage_table(name: str, trace: Trace) -> Table | None:
    """Return a row for each stage.

    It has the layers, medians of each kind of compute, and their sum divided by the stages' mean.
    """
    medians = stage_medians_s(trace)
    if not medians:
        return None
    kinds = [kind for kind in COMPUTE if any(kind in by_kind for by_kind in medians.values())]
    totals = {stage: sum(by_kind.values()) for stage, by_kind in medians.items()}
    mean_s = sum(totals.values()) / len(totals)
    cuts = trace.boundaries
    unit = table_unit(trace)
    rows: list[tuple[Cell, ...]] = [
        (
            stage,
            f"{cuts[stage]} to {cuts[stage + 1] - 1}" if stage + 1 < len(cuts) else None,
            *(_scaled(by_kind.get(kind), 1 / unit.size) for kind in kinds),
            totals[stage] / unit.size,
            totals[stage] / mean_s if mean_s else None,
        )
        for stage, by_kind in sorted(medians.items())
    ]
    columns = (
        "stage",
        "layers",
        *(f"{kind} [{unit.name}]" for kind in kinds),
        f"together [{unit.name}]",
        "over the mean",
    )
    return Table(name, f"Stages, medians of one pass, {trace.source}", columns, rows)


def stage_medians_s(trace: Trace) -> dict[int, dict[str, float]]:
    """Return the median duration of F, B, I, W and R by stage in seconds, over all ranks.

    Warm-up steps are left out. The actions of segments are summed over the segments of their stage,
    as one pass over the stage.
    """
    counted = trace.steps["step"][trace.steps["is_warmup"] == 0]
    events = trace.events[of_kinds(trace.events, *COMPUTE) & np.isin(trace.events["step"], counted)]
    if not len(events):
        return {}
    (passes,) = place_numbers(PASS, events)
    first = np.unique(passes, return_index=True)[1]
    durations_s = np.bincount(passes, events["end_ns"] - events["start_ns"]) * NS
    (groups,) = place_numbers(("stage", "kind"), events[first])
    medians_s: dict[int, dict[str, float]] = {}
    for group in range(groups.max() + 1):
        is_mine = groups == group
        event = events[first[is_mine][0]]
        times = medians_s.setdefault(int(event["stage"]), {})
        times[KINDS[event["kind"]]] = float(np.median(durations_s[is_mine]))
    return medians_s


def cause_table(name: str, causes: Attribution, trace: Trace) -> Table:
    """Return a row for each cause: its part of the step, averaged over the ranks."""
    step_s = causes.step_s or 1.0
    unit = table_unit(trace)
    parts = {"useful compute, ideal": causes.ideal_s, **causes.run_s}
    rows = [
        (cause.replace("_", " "), seconds / unit.size, 100 * seconds / step_s)
        for cause, seconds in parts.items()
    ]
    columns = ("cause", f"{unit.name}/step", "of the step [%]")
    return Table(name, f"Where a step's time went, {trace.source}", columns, rows, (0, 3, 2))


def prediction_table(name: str, metrics: Metrics, trace: Trace) -> Table | None:
    """Return a row for each predicted quantity: prediction, observation and relative difference.

    Return None if there is no prediction.
    """
    rows: list[tuple[Cell, ...]] = []

    def add(
        quantity: str, rank: int | None, predicted: float | None, measured: float | None
    ) -> None:
        if predicted is not None and measured:
            rows.append((quantity, rank, predicted, measured, 100 * (predicted / measured - 1.0)))

    planned = _planned(trace)
    if TIME_UNIT not in trace.attributes:
        add(
            "step time [ms]",
            None,
            _scaled(planned.get("step_s"), 1e3),
            _scaled(metrics.step_median_s, 1e3),
        )
    add(
        "bubble, by formula [%]",
        None,
        _scaled(metrics.bubble_formula, 100),
        _scaled(metrics.bubble_measured, 100),
    )
    for quantity, predicted_name, found_name in PEAKS:
        predicted = trace.attributes.get(predicted_name, planned.get(predicted_name, ()))
        measured = trace.attributes.get(found_name, ())
        if isinstance(predicted, Sequence) and isinstance(measured, Sequence) and len(measured):
            for rank, peak in enumerate(measured):
                if peak is None or peak < 0:  # a rank whose part is missing
                    continue
                of_rank = predicted[rank % len(predicted)] if predicted else None
                add(
                    f"peak, {quantity} [MiB]",
                    rank,
                    _scaled(of_rank, 1 / MIB),
                    _scaled(peak, 1 / MIB),
                )
    columns = ("quantity", "rank", "predicted", trace.source, "difference [%]")
    return (
        Table(name, f"Predicted beside {trace.source}", columns, rows, (0, 0, 3, 3, 2))
        if rows
        else None
    )


def _planned(trace: Trace) -> dict[str, Any]:
    """Return the predictions of the memory plan."""
    try:
        document = json.loads(trace.memory_plan) if trace.memory_plan else {}
    except ValueError:
        return {}
    predicted = document.get("predicted") if isinstance(document, dict) else None
    return predicted if isinstance(predicted, dict) else {}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else float(value) * factor

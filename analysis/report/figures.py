"""Key figures of a run: few, large, each with its unit and a line of detail."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.metrics.run_metrics import Metrics
from analysis.metrics.statistics import min_values
from analysis.report.markup import Html, element
from analysis.report.table import Cell
from gems.trace import Trace
from gems.utils.units import MIB, UNKNOWN, Unit, bytes_unit, number, time_unit


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its name, its value with unit, and a line of detail."""

    name: str
    value: str
    detail: str = ""

    def html(self) -> Html:
        """Return a term and its descriptions."""
        parts = [element("dt", self.name), element("dd", self.value, class_="value")]
        return element("div", *parts, *([element("dd", self.detail)] if self.detail else []), class_="key")


def key_figures(metrics: Metrics, trace: Trace) -> list[Figure]:
    """Return the figures of a run's headline; those that the trace does not contain are left out."""
    found = [
        Figure("images/s", _known(metrics.images_per_s), f"{metrics.num_images} images in {metrics.num_steps} steps"),
        _step_time(metrics),
        Figure("efficiency", _percent(metrics.efficiency), "useful compute over ranks x time"),
        Figure("bubble", _percent(metrics.bubble_measured), f"by formula {_percent(metrics.bubble_formula)}"),
        *_peaks(metrics),
    ]
    if metrics.loss_first is not None and metrics.loss_last is not None:
        found.append(Figure("training loss", f"{metrics.loss_last:.4g}", f"first {metrics.loss_first:.4g}"))
    accuracy, majority = (trace.attributes.get(f"validation_{name}") for name in ("accuracy", "majority"))
    if accuracy is not None:
        beside = "" if majority is None else f"majority class {_percent(float(majority))}"
        found.append(Figure("validation accuracy", _percent(float(accuracy)), beside))
    return [figure for figure in found if figure.value != UNKNOWN]


def overview_row(metrics: Metrics) -> dict[str, Cell]:
    """Return the figures by which runs are compared, each in one unit; None if unknown."""
    peaks = [peak for peak in metrics.peak_device_bytes if peak]
    return {
        "images/s": metrics.images_per_s,
        "step, median [ms]": _times(metrics.step_median_s, 1e3),
        "efficiency [%]": _times(metrics.efficiency, 100),
        "bubble [%]": _times(metrics.bubble_measured, 100),
        "peak on a device [MiB]": max(peaks) / MIB if peaks else None,
        "last loss": metrics.loss_last,
    }


def _step_time(metrics: Metrics) -> Figure:
    unit = time_unit([metrics.step_p95_s])
    details = [f"95th percentile {_with_unit(metrics.step_p95_s, unit)}"]
    low, high = metrics.step_low_s, metrics.step_high_s
    if low is not None and high is not None and low < high:
        name = "95 % interval" if metrics.num_steps >= min_values() else "fastest to slowest"
        details.insert(0, f"{name} {unit.show(low)} to {unit.show(high)}")
    warm_up = f", {metrics.num_warmup_steps} warm-up left out" if metrics.num_warmup_steps else ""
    detail = "; ".join(details) + f"; {metrics.num_steps} steps{warm_up}"
    return Figure("step time, median", _with_unit(metrics.step_median_s, unit), detail)


def _peaks(metrics: Metrics) -> list[Figure]:
    found = []
    for name, peaks in (
        ("peak on a device", metrics.peak_device_bytes),
        ("peak by the driver", metrics.peak_driver_bytes),
        ("peak resident memory", metrics.peak_rss_bytes),
    ):
        known = [(peak, rank) for rank, peak in enumerate(peaks) if peak]
        if known:
            unit = bytes_unit([max(known)[0]])
            most, least = max(known), min(known)
            found.append(Figure(name, _with_unit(most[0], unit), f"rank {most[1]}; least {_with_unit(least[0], unit)}"))
    return found


def _with_unit(value: float | None, unit: Unit) -> str:
    return UNKNOWN if value is None else f"{unit.show(value)} {unit.name}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _known(value: float | None) -> str:
    return UNKNOWN if value is None else number(value)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"

"""The picture of data parallelism beside workers of several devices.

Speed-ups, bands, and break-even points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.papers.hybrid import PAPER, Projection, law_speedups, speedups
from analysis.plots.figure import (
    LINE_COLOURS,
    TEXT_COLOUR,
    WIDTH_IN,
    add_legend,
    label_counts,
    new_figure,
)
from gems.planner.hybrid.pal import DEGREE, Verdict
from gems.utils.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ONE_COLOUR, HYBRID_COLOUR = LINE_COLOURS[:2]
MARK_COLOUR = "#666666"
MAX_TICKS = 7
PANEL_IN = 3.1
LOG_FROM = 6.0  # the largest over the smallest speed-up from which on the axis is logarithmic


def projections_figure(found: Sequence[Projection]) -> Figure:
    """Build the picture of the paper's networks side by side."""
    units = [f"speed-up over {counted(min(one.network.epochs), 'device')}" for one in found]
    figure, panels = _panels(f"Recomputed from the inputs of {PAPER}", units)
    labels = {
        1: ("data parallelism", ONE_COLOUR),
        DEGREE: (f"workers of {DEGREE} devices", HYBRID_COLOUR),
    }
    for axes, one in zip(panels, found, strict=True):
        for ways, points in speedups(one.network).items():
            _draw_line(
                axes,
                *labels[ways],
                [(count, each.low, each.value, each.high) for count, each in points],
            )
        for ways, law in law_speedups(one.network).items():
            label = f"{labels[ways][0]}, by the noise scale"
            colour = labels[ways][1]
            axes.plot(
                *zip(*law, strict=True), color=colour, linewidth=0.9, linestyle=":", label=label
            )
        last = one.gains[-1]
        is_derived = one.network.verdict is not Verdict.REPRODUCED
        detail = "epochs derived from that gain" if is_derived else "inputs recalled, not confirmed"
        title = f"{one.network.title}: {100 * last.gain:+.1f} % at {last.devices}\n{detail}"
        _scale(axes, title)
        crossing = one.crossing
        if crossing.devices is not None and crossing.below is not None:
            _mark(
                axes, crossing.devices, crossing.low, crossing.high, f"from {crossing.devices} on"
            )
        if one.noise_devices is not None:
            _mark(
                axes,
                round(one.noise_devices),
                None,
                None,
                f"{round(one.noise_devices)} by the noise scale",
            )
    add_legend(figure, panels[0].get_legend_handles_labels()[0], 8)
    return figure


def plan_figure(answer: dict[str, Any]) -> Figure:
    """Build the picture of an answer of `gems plan --hybrid --json`.

    One device a worker, and the fastest of several.

    Raises:
        ValueError: the answer has no choice at any number of devices.
    """
    unit = f"speed-up over {answer['base']['workers']} x {answer['base']['ways']}"
    figure, (axes,) = _panels("Data parallelism and workers of several devices: predicted", [unit])
    for label, colour, is_several in (
        ("data parallelism", ONE_COLOUR, False),
        ("workers of several devices, the fastest", HYBRID_COLOUR, True),
    ):
        band = []
        for row in answer["rows"]:
            speeds = [
                each["speedup"] for each in row["choices"] if (each["ways"] > 1) is is_several
            ]
            band += [
                (int(row["devices"]), *(float(each[end]) for end in ("low", "value", "high")))
                for each in speeds[:1]
            ]
        if band:
            _draw_line(axes, label, colour, band)
    if not axes.lines:
        raise ValueError("no choice at any number of devices")
    title = (
        f"{answer['model']} at {answer['height_px']}x{answer['width_px']} px\n"
        f"{answer['worker_batch']:g} samples a step of a worker, bands 95 %"
    )
    _scale(axes, title)
    found = [each for each in answer["crossings"] if each["devices"] is not None]
    first = min(found, key=lambda each: int(each["devices"]), default=None)
    if (
        first is not None and first["below"] is not None
    ):  # it is not faster from the fewest devices on
        devices = int(first["devices"])
        _mark(axes, devices, first["low"], first["high"], f"{first['ways']} ways from {devices} on")
    add_legend(figure, axes.get_legend_handles_labels()[0], 8)
    return figure


def _panels(headline: str, units: Sequence[str]) -> tuple[Figure, list[Axes]]:
    count = len(units)
    width_in = max(WIDTH_IN * 0.7, PANEL_IN * count)
    figure, panels = new_figure(width_in, 4.0, 1, count, x="devices", y=units, has_grid=True)
    figure.suptitle(headline, x=0.01, ha="left", fontsize=10, fontweight="bold", color=TEXT_COLOUR)
    return figure, panels


def _draw_line(axes: Axes, label: str, colour: str, band: Iterable[tuple[float, ...]]) -> None:
    """Draw speed-ups by devices with their band: devices, low, value and high of each point."""
    devices, lows, values, highs = zip(*band, strict=True)
    axes.plot(devices, values, color=colour, linewidth=1.4, marker="o", markersize=4, label=label)
    if lows != highs:
        axes.fill_between(devices, lows, highs, color=colour, alpha=0.18, linewidth=0)
        axes.vlines(devices, lows, highs, color=colour, linewidth=0.9)


def _mark(axes: Axes, devices: int, low: float | None, high: float | None, label: str) -> None:
    """Draw a break-even point, with the ends of its band if they are known."""
    axes.axvline(devices, color=MARK_COLOUR, linewidth=1.0, linestyle="--")
    if low is not None and high is not None:
        axes.axvspan(low, high, color=MARK_COLOUR, alpha=0.12, linewidth=0)
    axes.annotate(
        label,
        (devices, 0.03),
        (-3, 0),
        ("data", "axes fraction"),
        "offset points",
        ha="right",
        rotation=90,
        fontsize=8,
        color=TEXT_COLOUR,
    )


def _scale(axes: Axes, title: str) -> None:
    """Scale the axes to the lines that are drawn, and label them."""
    least = np.concatenate([line.get_ydata() for line in axes.lines]).min()
    most = axes.dataLim.y1
    label_counts(
        axes,
        np.concatenate([line.get_xdata() for line in axes.lines]).astype(int).tolist(),
        MAX_TICKS,
    )
    if most > LOG_FROM * least:
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(0.0, 1.15 * most)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(title, loc="left", fontsize=8.5, color=TEXT_COLOUR)

"""The picture of data parallelism beside workers of several devices.

Speed-up over devices, bands, and break-even points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.io.files import from_answer
from analysis.papers.hybrid import PAPER, Projection, law_speedups, speedups
from analysis.plots.figure import TEXT_COLOUR, WIDTH_IN, check_picture_path, empty_figure, save_figure, style_axes
from gems.planner.hybrid.pal import DEGREE, Verdict
from gems.utils.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ONE_COLOUR, HYBRID_COLOUR, CROSSING_COLOUR = "#0072b2", "#d55e00", "#666666"
MAX_TICKS = 7
PANEL_IN = 3.1
# The largest over the smallest speed-up from which on the axis is logarithmic.
LOG_FROM = 6.0


# A break-even point: devices, the ends of its band (None if unknown), and its label.
Mark = tuple[int, float | None, float | None, str]


@dataclass(frozen=True, slots=True)
class Line:
    """Speed-ups by devices, with the ends of their bands; a law is drawn without marks, dashed."""

    label: str
    colour: str
    devices: tuple[int, ...]
    values: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    is_law: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: its lines and break-even points."""

    title: str
    detail: str
    unit: str
    lines: tuple[Line, ...]
    crossings: tuple[Mark, ...]


def draw_projections(found: Sequence[Projection], out: Path) -> None:
    """Draw the paper's three networks side by side.

    Raises:
        ConfigError: the picture cannot be written.
    """
    check_picture_path(out)
    _draw([_projection_panel(one) for one in found], f"Recomputed from the inputs of {PAPER}", out)


def draw_answer(path: Path, out: Path) -> None:
    """Draw an answer of `gems plan --hybrid --json`.

    Raises:
        ConfigError: the file holds no such answer, or the picture cannot be written.
    """
    check_picture_path(out)
    panel = from_answer(path, "answer", "gems plan --hybrid --json", _answer_panel)
    _draw([panel], "Data parallelism and workers of several devices: predicted", out)


def _projection_panel(one: Projection) -> Panel:
    network = one.network
    by_ways = speedups(network)
    labels = {1: ("data parallelism", ONE_COLOUR), DEGREE: (f"workers of {DEGREE} devices", HYBRID_COLOUR)}
    lines = tuple(
        Line(
            *labels[ways],
            tuple(count for count, _ in points),
            tuple(each.value for _, each in points),
            tuple(each.low for _, each in points),
            tuple(each.high for _, each in points),
        )
        for ways, points in by_ways.items()
    )
    for ways, law in law_speedups(network).items():
        label, colour = labels[ways]
        counts, values = tuple(count for count, _ in law), tuple(value for _, value in law)
        lines += (Line(f"{label}, by the noise scale", colour, counts, values, values, values, is_law=True),)
    found = one.crossing
    crossings: tuple[Mark, ...] = (
        ((found.devices, found.low, found.high, f"from {found.devices} on"),)
        if found.devices is not None and found.below is not None
        else ()
    )
    if one.noise_devices is not None:
        place = round(one.noise_devices)
        crossings += ((place, None, None, f"{place} by the noise scale"),)
    is_derived = network.verdict is not Verdict.REPRODUCED
    last = one.gains[-1]
    return Panel(
        f"{network.title}: {100 * last.gain:+.1f} % at {last.devices}",
        "epochs derived from that gain" if is_derived else "inputs recalled, not confirmed",
        f"speed-up over {counted(min(network.epochs), 'device')}",
        lines,
        crossings,
    )


def _answer_panel(document: dict[str, Any]) -> Panel:
    one: list[tuple[int, dict[str, float]]] = []
    several: list[tuple[int, dict[str, float]]] = []
    for row in document["rows"]:
        choices = row["choices"]
        one += [(row["devices"], each["speedup"]) for each in choices if each["ways"] == 1][:1]
        several += [(row["devices"], each["speedup"]) for each in choices if each["ways"] > 1][:1]
    lines = tuple(
        Line(
            label, colour,
            tuple(int(count) for count, _ in points),
            *_ends([each for _, each in points]),
        )
        for label, colour, points in (
            ("data parallelism", ONE_COLOUR, one), ("workers of several devices, the fastest", HYBRID_COLOUR, several),
        )
        if points
    )  # fmt: skip
    if not lines:
        raise ValueError("no choice at any number of devices")
    first = min(
        (each for each in document["crossings"] if each["devices"] is not None),
        key=lambda each: int(each["devices"]),
        default=None,
    )
    crossings: tuple[Mark, ...] = ()
    if first is not None and first["below"] is not None:  # it is not faster from the fewest devices on
        devices, ways = int(first["devices"]), first["ways"]
        crossings = ((devices, first["low"], first["high"], f"{ways} ways from {devices} on"),)
    base = document["base"]
    return Panel(
        f"{document['model']} at {document['height_px']}x{document['width_px']} px",
        f"{document['worker_batch']:g} samples a step of a worker, bands 95 %",
        f"speed-up over {base['workers']} x {base['ways']}",
        lines,
        crossings,
    )


def _ends(quantities: Sequence[dict[str, float]]) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    values, lows, highs = (tuple(float(each[end]) for each in quantities) for end in ("value", "low", "high"))
    return values, lows, highs


def _draw(panels: Sequence[Panel], headline: str, out: Path) -> None:
    width_in = max(WIDTH_IN * 0.7, PANEL_IN * len(panels))
    figure = empty_figure(width_in, 4.0)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel)
    figure.suptitle(headline, x=0.01, ha="left", fontsize=10, fontweight="bold", color=TEXT_COLOUR)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save_figure(figure, out)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    for line in panel.lines:
        if line.is_law:
            axes.plot(line.devices, line.values, color=line.colour, linewidth=0.9, linestyle=":", label=line.label)
            continue
        axes.plot(
            line.devices, line.values, color=line.colour, linewidth=1.4, marker="o", markersize=4, label=line.label,
        )  # fmt: skip
        if line.lows != line.highs:
            axes.fill_between(line.devices, line.lows, line.highs, color=line.colour, alpha=0.18, linewidth=0)
            axes.vlines(line.devices, line.lows, line.highs, color=line.colour, linewidth=0.9)
    for devices, low, high, label in panel.crossings:
        axes.axvline(devices, color=CROSSING_COLOUR, linewidth=1.0, linestyle="--")
        if low is not None and high is not None:
            axes.axvspan(low, high, color=CROSSING_COLOUR, alpha=0.12, linewidth=0)
        axes.annotate(
            label, (devices, 0.03), (-3, 0), ("data", "axes fraction"), "offset points", ha="right", rotation=90,
            fontsize=8, color=TEXT_COLOUR,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    values = [value for line in panel.lines for value in (*line.values, *line.highs)]
    if max(values) > LOG_FROM * min(values):
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(0.0, 1.15 * max(values))
    ticks = sorted({count for line in panel.lines for count in line.devices})
    ticks = ticks[:: -(-len(ticks) // MAX_TICKS)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    style_axes([axes], 8, has_grid=True)
    axes.set_xlabel("devices", fontsize=9, color=TEXT_COLOUR)
    axes.set_ylabel(panel.unit, fontsize=9, color=TEXT_COLOUR)
    axes.set_title(f"{panel.title}\n{panel.detail}", loc="left", fontsize=8.5, color=TEXT_COLOUR)

"""The picture of memory plans: bytes over the time of a step under each policy, on the device and in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.plots.figure import (
    TEXT_COLOUR,
    WIDTH_IN,
    draw_answer_file,
    empty_figure,
    scaled_pt,
    set_title,
    style_axes,
)
from gems.utils.units import bytes_unit, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#222222", "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#7f7f7f")
HEIGHT_IN = 5.6
FAR = 2.0
Points = list[tuple[float, float]]


def draw_memory_plans(path: Path, out: Path) -> None:
    """Draw the answer of `gems memory`, see `draw_answer_file`.

    Each policy is a line: the rank that holds most, over one simulated step, with the device's limit if there is one.
    """
    draw_answer_file(path, out, "memory", "gems memory", lambda answer: memory_plans_figure(answer, answer["curves"]))


def memory_plans_figure(answer: dict[str, Any], curves: list[dict[str, Any]]) -> Figure:
    """Build the figure: the device's bytes above, those in host memory below, over one step in ms."""
    figure = empty_figure(WIDTH_IN, HEIGHT_IN)
    device, host = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    most = max((size for curve in curves for _, size in curve["device"]), default=0.0)
    unit = bytes_unit([most])
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        _line(device, curve["device"], unit.size, colour, curve["policy"])
        _line(host, curve["host"], unit.size, colour, None)
    limit = answer["limit_bytes"]
    if limit is not None and limit > FAR * most:
        limit = None  # far above all curves, it would flatten them
    if limit is not None:
        device.axhline(limit / unit.size, color="#b00020", linestyle="--", linewidth=1, label="limit")
    for axes, label in ((device, f"device ({unit.name})"), (host, f"host ({unit.name})")):
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label, fontsize=scaled_pt(figure, 9), color=TEXT_COLOUR)
    style_axes((device, host), scaled_pt(figure, 8))
    host.set_xlabel("time from the step's start (ms)", fontsize=scaled_pt(figure, 9), color=TEXT_COLOUR)
    device.legend(fontsize=scaled_pt(figure, 8), frameon=False, ncols=4, loc="upper right")
    device.set_ylim(top=1.25 * max(most, limit or 0.0) / unit.size)
    set_title(
        figure, device,
        f"{answer['model']} at {answer['height_px']}x{answer['width_px']} px, {answer['schedule']} on "
        f"{counted(answer['partitions'], 'rank')}",
        f"the rank that holds most, SIMULATED, a prediction "
        f"({answer['profile_source']} profile, {answer['profile_device']})",
    )  # fmt: skip
    return figure


def _line(axes: Axes, points: Points, unit: float, colour: str, label: str | None) -> None:
    times = [time * 1e3 for time, _ in points]
    axes.step(times, [size / unit for _, size in points], where="post", color=colour, linewidth=1.2, label=label)

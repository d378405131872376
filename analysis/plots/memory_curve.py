"""The memory curve, from a trace: device bytes over the time of one step, one panel per rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from analysis.io.run_config import run_facts
from analysis.metrics.events import StepWindow, by_rank, of_kinds, place_numbers, step_window
from analysis.plots.figure import (
    TEXT_COLOUR,
    WIDTH_IN,
    add_legend,
    new_figure,
    set_title,
    show_units,
    source_mark,
)
from gems.errors import ConfigError
from gems.trace import Trace
from gems.utils.units import Unit, bytes_unit, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 16
MAX_COLUMNS = 1400  # of pixels in a panel
CURVE_COLOUR, AREA_COLOUR, PEAK_COLOUR = "#1f65a8", "#d6e6f3", "#c94f07"
BUFFER_COLOUR, HOST_COLOUR, HOST_STYLE = "#e8a33d", "#117a8b", (0, (4, 2))
COUNTED = ("emulated", "simulated")
MS = 1e-6
# The buffer of a receive is held until the action that reads it has ended.
READERS = {"RECV_F": ("F",), "RECV_B": ("B", "I")}
MESSAGE = ("step", "stage", "direction", "micro_batch")


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes on one rank's device: `held_bytes[i]` from `time_ms[i]` on, since the step's start.

    `buffer_bytes` is the part for buffers of messages (0 in a measured run, which does not
    distinguish them); `host_bytes` are the copies in host memory.
    """

    rank: int
    time_ms: np.ndarray
    held_bytes: np.ndarray
    buffer_bytes: np.ndarray
    host_bytes: np.ndarray

    @property
    def peak_bytes(self) -> int:
        """The most bytes held."""
        return int(self.held_bytes.max())


def memory_figure(trace: Trace) -> Figure:
    """Build the picture of device bytes over the last whole step after warm-up.

    Each rank has a stepped curve in its own panel with the same axes; the peak is marked and
    labelled. Next to it are the peaks over the whole run of resident memory and of the driver's
    figure, if there are samples. In emulated and simulated runs the buffers of messages are drawn
    above the activations in their own colour, and the parameters, which are constant, are named
    next to the panel. Copies in host memory are a dashed line. If there are more than 16 ranks, the
    16 with the highest peaks are shown.

    Raises:
        ConfigError: There is no step, or the trace has no device bytes in it.
    """
    from matplotlib.ticker import MaxNLocator

    window = step_window(trace)
    parts = {rank: replace(trace, events=events) for rank, events in by_rank(trace.events).items()}
    curves = [
        curve
        for rank, part in parts.items()
        if (curve := rank_curve(part, window, rank)) is not None
    ]
    if not curves:
        raise ConfigError("trace", trace.source, "its events carry no device_bytes")
    highest = sorted(curves, key=lambda curve: -curve.peak_bytes)[:MAX_PANELS]
    shown = sorted(highest, key=lambda curve: curve.rank)
    unit = bytes_unit([highest[0].peak_bytes])
    height_in = 1.3 + 0.62 * max(len(shown), 2)
    figure, panels = new_figure(WIDTH_IN, height_in, len(shown), sharex=True, sharey=True)
    for axes, curve in zip(panels, shown, strict=True):
        _draw_curve(axes, trace, curve, unit)
    panels[0].set_xlim(0.0, max(window.span_s * 1e3, 1e-9))
    panels[0].set_ylim(0.0, highest[0].peak_bytes / unit.size * 1.25 or 1.0)
    panels[0].yaxis.set_major_locator(MaxNLocator(3))
    show_units(panels[-1], trace.attributes)
    _name_parts(figure, shown)
    figure.supylabel(f"held on the device ({unit.name})", fontsize=9, color=TEXT_COLOUR)
    low, high = (unit.show(pick(curve.peak_bytes for curve in curves)) for pick in (min, max))
    peaks = f"peak {high} {unit.name}" if low == high else f"peaks {low} to {high} {unit.name}"
    of_many = (
        f", the {MAX_PANELS} highest of {len(curves)} ranks" if len(curves) > MAX_PANELS else ""
    )
    name = run_facts(trace).schedule or "unnamed schedule"
    size = counted(trace.world_size, "rank")
    headline = f"{name}, {size}: {source_mark(trace.source, trace.attributes)}"
    set_title(figure, panels[0], headline, f"{window.label}: device memory, {peaks}{of_many}")
    return figure


def rank_curve(trace: Trace, window: StepWindow, rank: int) -> Curve | None:
    """Return the curve of one rank, starting from the bytes before the step, if it has a ledger."""
    events = trace.events[(trace.events["rank"] == rank) & (trace.events["device_bytes"] >= 0)]
    events = events[np.argsort(events["end_ns"], kind="stable")]
    inside = events[events["step"] == window.step]
    if not len(inside):
        return None
    before = events[(events["step"] < window.step) & (events["end_ns"] <= inside["end_ns"][0])]
    first_bytes = before["device_bytes"][-1:] if len(before) else inside["device_bytes"][:1]
    time_ns = (
        np.concatenate([[window.start_ns], inside["end_ns"], [window.end_ns]]) - window.start_ns
    )
    held_bytes = np.concatenate([first_bytes, inside["device_bytes"], inside["device_bytes"][-1:]])
    host_bytes = np.concatenate([[0], inside["host_bytes"], inside["host_bytes"][-1:]])
    buffers = np.zeros(len(time_ns), np.int64)
    if trace.source in COUNTED:
        of_rank = trace.events[trace.events["rank"] == rank]
        buffers = np.minimum(buffer_bytes(of_rank, time_ns + window.start_ns), held_bytes)
    return Curve(rank, np.maximum(time_ns, 0) * MS, held_bytes, buffers, host_bytes)


def thinned(curve: Curve) -> Curve:
    """Thin out a long curve for drawing.

    Each column of pixels keeps its first, smallest, largest and last bytes.
    """
    if len(curve.time_ms) <= 4 * MAX_COLUMNS:
        return curve
    column = np.floor(curve.time_ms / max(curve.time_ms[-1], 1e-12) * MAX_COLUMNS).astype(np.int64)
    by_bytes = np.lexsort((curve.held_bytes, column))
    is_first = np.diff(column[by_bytes], prepend=-1) > 0
    is_last = np.append(is_first[1:], True)
    starts = np.flatnonzero(np.diff(column, prepend=-1) > 0)
    places = np.unique(
        np.concatenate(
            [by_bytes[is_first], by_bytes[is_last], starts, starts[1:] - 1, [len(column) - 1]]
        )
    )
    columns = ("time_ms", "held_bytes", "buffer_bytes", "host_bytes")
    return replace(curve, **{name: getattr(curve, name)[places] for name in columns})


def _draw_curve(axes: Axes, trace: Trace, curve: Curve, unit: Unit) -> None:
    """Draw the curve of a rank, and name the rank and its peaks to the right of the panel."""
    drawn = thinned(curve)
    lines = [f"rank {curve.rank}: peak {_human(curve.peak_bytes)}"]
    heights = drawn.held_bytes / unit.size
    below = (drawn.held_bytes - drawn.buffer_bytes) / unit.size
    axes.fill_between(drawn.time_ms, below, step="post", color=AREA_COLOUR, linewidth=0)
    axes.fill_between(drawn.time_ms, below, heights, step="post", color=BUFFER_COLOUR, linewidth=0)
    if curve.host_bytes.any():
        host = drawn.host_bytes / unit.size
        axes.step(
            drawn.time_ms,
            host,
            where="post",
            color=HOST_COLOUR,
            linewidth=1.0,
            linestyle=HOST_STYLE,
        )
        lines.append(f"host copies {_human(int(curve.host_bytes.max()))}")
    axes.step(drawn.time_ms, heights, where="post", color=CURVE_COLOUR, linewidth=1.0)
    peak = int(np.argmax(heights))
    axes.plot(
        drawn.time_ms[peak],
        heights[peak],
        "o",
        color=PEAK_COLOUR,
        markersize=4,
        clip_on=False,
        zorder=3,
    )
    parameters = trace.attributes.get("param_bytes", ())
    if curve.rank < len(parameters) and parameters[curve.rank]:
        lines.append(f"beside parameters {_human(int(parameters[curve.rank]))}")
    samples = trace.samples[trace.samples["rank"] == curve.rank]
    for column, name in (("rss_bytes", "resident"), ("device_bytes", "driver")):
        most = int(samples[column].max(initial=-1))
        if most >= 0:
            lines.append(f"{name} {_human(most)}")
    axes.annotate(
        "\n".join(lines),
        (1, 0.5),
        (8, 0),
        "axes fraction",
        "offset points",
        fontsize=7.5,
        color=TEXT_COLOUR,
        va="center",
        linespacing=1.25,
        annotation_clip=False,
    )


def _name_parts(figure: Figure, shown: list[Curve]) -> None:
    """Add a legend if there is more than one part."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(facecolor=AREA_COLOUR, label="activations")]
    if any(curve.buffer_bytes.any() for curve in shown):
        handles.append(Patch(facecolor=BUFFER_COLOUR, label="buffers of messages"))
    if any(curve.host_bytes.any() for curve in shown):
        handles.append(
            Line2D([], [], color=HOST_COLOUR, linestyle=HOST_STYLE, label="copies in host memory")
        )
    if len(handles) > 1:
        add_legend(figure, handles, columns=3)


def _human(size_bytes: int) -> str:
    unit = bytes_unit([size_bytes])
    return f"{unit.show(size_bytes)} {unit.name}"


def buffer_bytes(events: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    """Return the bytes of boundary buffers that a rank holds just after each of `times_ns`.

    `events` are those of the rank. A send's buffer is held from its posting until it is complete, a
    receive's from its posting until the compute that reads it has ended; this is so in emulated and
    simulated runs.
    """
    sends = events[of_kinds(events, "SEND_F", "SEND_B")]
    messages = [sends]
    until_ns = [sends["end_ns"]]
    for kind, readers in READERS.items():
        messages.append(events[of_kinds(events, kind)])
        until_ns.append(_read_ns(messages[-1], events[of_kinds(events, *readers)]))
    sizes = np.concatenate(messages)
    changed_ns = np.concatenate([sizes["start_ns"], *until_ns])
    changes = np.concatenate([sizes["moved_bytes"], -sizes["moved_bytes"]])
    order = np.argsort(changed_ns)
    sums: np.ndarray = np.concatenate([[0], np.cumsum(changes[order])])
    return sums[np.searchsorted(changed_ns[order], times_ns, side="right")]


def _read_ns(receives: np.ndarray, readers: np.ndarray) -> np.ndarray:
    """Return the end of each receive's last reader, or the receive's own end without a reader."""
    read_at, places = place_numbers(MESSAGE, readers, receives)
    end_ns = np.full(len(readers) + len(receives), -1, np.int64)
    end_ns[read_at] = readers["end_ns"]
    found = end_ns[places]
    read_ns: np.ndarray = np.where(found < 0, receives["end_ns"], found)
    return read_ns

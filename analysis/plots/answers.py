"""Pictures of the answers of `gems partition`, `memory`, `place` and `plan --hybrid`."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.plots.figure import (
    LINE_COLOURS,
    TEXT_COLOUR,
    WIDTH_IN,
    label_counts,
    new_figure,
    set_title,
)
from gems.utils.units import MIB, bytes_unit, counted, format_size, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, _ = LINE_COLOURS
POLICY_COLOURS = (TEXT_COLOUR, BLUE, SKY, GREEN, ORANGE, VERMILION, PINK, "#7f7f7f")
STAGE_COLOURS = ("#d9e6f2", "#f2e3cc")
MAX_NAMES = 40
ROW_IN = 0.42
BARS_IN = 1.7
DEVICE_IN = 0.55
# a limit this many times above all curves is not drawn, because it would flatten them
FAR = 2.0


def partition_figure(answer: dict[str, Any]) -> Figure:
    """Build the figure of a partition.

    It shows the times and bytes of the layers, and a row for each method. A row shows the method's
    stages, with the peaks of their ranks if a rank has one stage or a pair of stages.
    """
    layers = answer["drawn_layers"]
    methods = answer["methods"]
    rows_in = ROW_IN * len(methods)
    about = "layers, first to last; in each stage the peak of its rank (MiB), the largest framed"
    figure, (times, sizes, cuts) = new_figure(
        WIDTH_IN,
        2 * BARS_IN + rows_in + 1.4,
        3,
        x=about,
        y=("time (ms)", "size (MiB)"),
        size_pt=7,
        sharex=True,
        height_ratios=[BARS_IN, BARS_IN, rows_in + 0.3],
    )
    places = np.arange(len(layers)) + 0.5
    times.bar(places, [layer["time_s"] * 1e3 for layer in layers], width=0.9, color=BLUE)
    stash, params = (
        [layer[name] / MIB for layer in layers] for name in ("stash_bytes", "param_bytes")
    )
    sizes.bar(places, stash, width=0.9, color=ORANGE, label="activations of one micro-batch")
    sizes.bar(places, params, width=0.9, bottom=stash, color=PINK, label="parameters")
    sizes.legend(fontsize=7, frameon=False)
    for axes in (times, sizes):
        for cut in methods[0]["boundaries"][1:-1]:
            axes.axvline(cut, color=TEXT_COLOUR, linewidth=0.8, linestyle=":")
    _draw_cuts(cuts, methods, has_peaks=answer["stages"] == answer["partitions"])
    names = [
        f"{method['method']}  {number(max(method['peak_bytes']) / MIB)} MiB" for method in methods
    ]
    cuts.set_yticks([-row for row in range(len(methods))], names)
    cuts.set_xlim(0, len(layers))
    if len(layers) <= MAX_NAMES:
        cuts.set_xticks(places, [layer["name"] for layer in layers], rotation=90)
    set_title(
        figure,
        times,
        f"{answer['model']} at {format_size(answer)} px:"
        f" {counted(len(layers), 'layer')} in {counted(answer['stages'], 'stage')},"
        f" {answer['schedule']}",
        f"PREDICTED from a {answer['profile_source']} profile ({answer['profile_device']}); "
        f"dotted: the cuts of {methods[0]['method']}",
    )
    return figure


def _draw_cuts(cuts: Axes, methods: list[dict[str, Any]], *, has_peaks: bool) -> None:
    """Draw a row of stages for each method, with the peaks of their ranks if `has_peaks`."""
    for row, method in enumerate(methods):
        boundaries = method["boundaries"]
        peaks = method["peak_bytes"]
        for stage, (first, end) in enumerate(pairwise(boundaries)):
            is_largest = has_peaks and peaks[stage] == max(peaks)
            cuts.barh(
                -row,
                end - first,
                left=first,
                height=0.8,
                color=STAGE_COLOURS[stage % 2],
                edgecolor=TEXT_COLOUR,
                linewidth=1.6 if is_largest else 0.6,
            )
            if has_peaks and end - first > 0.04 * boundaries[-1]:
                cuts.text(
                    (first + end) / 2,
                    -row,
                    number(peaks[stage] / MIB),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=TEXT_COLOUR,
                    fontweight="bold" if is_largest else "normal",
                )


def memory_plans_figure(answer: dict[str, Any]) -> Figure:
    """Build the figure of memory plans.

    It has a line for each policy over one simulated step, and the device's limit. It shows the rank
    that holds most: device bytes above, bytes in host memory below.
    """
    curves = answer["curves"]
    most = max((size for curve in curves for _, size in curve["device"]), default=0.0)
    unit = bytes_unit([most])
    labels = (f"device ({unit.name})", f"host ({unit.name})")
    figure, (device, host) = new_figure(
        WIDTH_IN, 5.6, 2, y=labels, sharex=True, height_ratios=(3, 1)
    )
    for place, curve in enumerate(curves):
        colour = POLICY_COLOURS[place % len(POLICY_COLOURS)]
        for axes, name, label in ((device, "device", curve["policy"]), (host, "host", None)):
            times_ms = [time * 1e3 for time, _ in curve[name]]
            sizes = [size / unit.size for _, size in curve[name]]
            axes.step(times_ms, sizes, where="post", color=colour, linewidth=1.2, label=label)
    limit = answer["limit_bytes"]
    if limit is not None and limit > FAR * most:
        limit = None
    if limit is not None:
        device.axhline(
            limit / unit.size, color="#b00020", linestyle="--", linewidth=1, label="limit"
        )
    host.set_ylim(bottom=0)
    device.legend(fontsize=8, frameon=False, ncols=4, loc="upper right")
    device.set_ylim(0, 1.25 * max(most, limit or 0.0) / unit.size)
    set_title(
        figure,
        device,
        f"{answer['model']} at {format_size(answer)} px, {answer['schedule']}"
        f" on {counted(answer['partitions'], 'rank')}",
        "the rank that holds most, SIMULATED, a prediction "
        f"({answer['profile_source']} profile, {answer['profile_device']})",
    )
    return figure


def placement_figure(answer: dict[str, Any]) -> Figure:
    """Build the figure of a placement: a row per device, a bar per forward or backward."""
    devices = range(answer["devices"])
    figure, (axes,) = new_figure(WIDTH_IN, 1.4 + DEVICE_IN * len(devices))
    for name, colour in (("forward", BLUE), ("backward", ORANGE)):
        for device in devices:
            rows = [row for row in answer["placement"] if row["device"] == device]
            spans = [(row[f"{name}_start_s"] * 1e3, row[f"{name}_s"] * 1e3) for row in rows]
            axes.broken_barh(
                spans,
                (-device - 0.4, 0.8),
                facecolors=colour,
                edgecolors="white",
                linewidth=0.3,
                label=None if device else name,
            )
    axes.set_yticks([-device for device in devices], [f"device {device}" for device in devices])
    axes.set_xlim(0, answer["step_s"] * 1e3)
    axes.legend(
        fontsize=8,
        frameon=False,
        labelcolor=TEXT_COLOUR,
        ncols=2,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )
    proof = (
        "optimal" if answer["optimal"] else f"within {100 * answer['gap']:.1f} % of the shortest"
    )
    set_title(
        figure,
        axes,
        f"{answer['model']}: {answer['operators']} operators on {answer['devices']} devices, "
        f"{answer['speed_up']:.2f} times as fast as one",
        f"PREDICTED for {answer['machine']}; {proof}",
    )
    return figure


def hybrid_figure(answer: dict[str, Any]) -> Figure:
    """Build the figure of a plan.

    It shows the speed-ups of one device per worker and of the fastest of several, with their bands.
    """
    base = answer["base"]
    counts = [row["devices"] for row in answer["rows"]]
    unit = f"speed-up over {base['workers']} x {base['ways']}"
    figure, (axes,) = new_figure(WIDTH_IN * 0.7, 4.0, x="devices", y=[unit], has_grid=True)
    for label, colour, is_several in (
        ("data parallelism", BLUE, False),
        ("workers of several devices", VERMILION, True),
    ):
        points = []
        for row in answer["rows"]:
            speedups = [
                each["speedup"] for each in row["choices"] if (each["ways"] > 1) is is_several
            ]
            points += [
                (row["devices"], each["low"], each["value"], each["high"]) for each in speedups[:1]
            ]
        if points:
            devices, lows, values, highs = zip(*points, strict=True)
            axes.plot(devices, values, color=colour, marker="o", markersize=4, label=label)
            axes.fill_between(devices, lows, highs, color=colour, alpha=0.18, linewidth=0)
    for crossing in answer["crossings"]:
        if crossing["devices"] is not None and crossing["below"] is not None:
            axes.axvline(crossing["devices"], color=TEXT_COLOUR, linewidth=1.0, linestyle="--")
    label_counts(axes, counts)
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=8, frameon=False)
    set_title(
        figure,
        axes,
        "Data parallelism and workers of several devices: PREDICTED",
        f"{answer['model']} at {format_size(answer)} px, "
        f"{answer['worker_batch']:g} samples a step of a worker, bands 95 %",
    )
    return figure

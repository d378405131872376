"""The picture of a partition: time and bytes of each layer, and the boundaries by each method."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.plots.figure import (
    TEXT_COLOUR,
    WIDTH_IN,
    draw_answer_file,
    empty_figure,
    scaled_pt,
    set_title,
    style_axes,
)
from gems.utils.units import MIB, counted, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIME_COLOUR, BYTES_COLOUR, PARAM_COLOUR, CUT_COLOUR = "#0072b2", "#e69f00", "#cc79a7", "#222222"
STAGE_COLOURS = ("#d9e6f2", "#f2e3cc")
MAX_NAMES = 40
ROW_IN, BARS_IN = 0.42, 1.7


def draw_partition(path: Path, out: Path) -> None:
    """Draw the answer of `gems partition`, see `draw_answer_file`.

    Layers are drawn side by side, first to last: their times, their bytes, and a row for each method with its stages
    and their peaks.
    """
    draw_answer_file(
        path,
        out,
        "partition",
        "gems partition",
        lambda answer: partition_figure(answer, answer["drawn_layers"], answer["methods"]),
    )


def partition_figure(answer: dict[str, Any], layers: list[dict[str, Any]], methods: list[dict[str, Any]]) -> Figure:
    """Build the figure: two panels of bars over the layers, and the rows of cuts below."""
    height_in = 2 * BARS_IN + ROW_IN * len(methods) + 1.4
    figure = empty_figure(WIDTH_IN, height_in)
    ratios = [BARS_IN, BARS_IN, ROW_IN * len(methods) + 0.3]
    panels = figure.subplots(3, 1, sharex=True, height_ratios=ratios)
    places = np.arange(len(layers)) + 0.5
    panels[0].bar(places, [layer["time_s"] * 1e3 for layer in layers], width=0.9, color=TIME_COLOUR)
    stash = np.array([layer["stash_bytes"] / MIB for layer in layers])
    params = np.array([layer["param_bytes"] / MIB for layer in layers])
    panels[1].bar(places, stash, width=0.9, color=BYTES_COLOUR, label="activations of one micro-batch")
    panels[1].bar(places, params, width=0.9, bottom=stash, color=PARAM_COLOUR, label="parameters")
    panels[1].legend(fontsize=scaled_pt(figure, 7), frameon=False)
    for axes, label in ((panels[0], "time (ms)"), (panels[1], "size (MiB)")):
        axes.set_ylabel(label, fontsize=scaled_pt(figure, 8), color=TEXT_COLOUR)
        for cut in methods[0]["boundaries"][1:-1]:
            axes.axvline(cut, color=CUT_COLOUR, linewidth=0.8, linestyle=":")
    for row, method in enumerate(methods):
        _draw_row(panels[2], figure, row, method, answer["stages"] == answer["partitions"])
    _label_rows(panels[2], figure, methods, layers)
    style_axes(panels, scaled_pt(figure, 7))
    set_title(
        figure, panels[0],
        f"{answer['model']} at {answer['height_px']}x{answer['width_px']} px: "
        f"{counted(len(layers), 'layer')} in {counted(answer['stages'], 'stage')}, {answer['schedule']}",
        f"PREDICTED from a {answer['profile_source']} profile ({answer['profile_device']}); "
        f"dotted: the cuts of {methods[0]['method']}",
    )  # fmt: skip
    return figure


def _draw_row(axes: Axes, figure: Figure, row: int, method: dict[str, Any], has_peaks: bool) -> None:
    """Draw the stages of one method; in each the peak of its rank, if a rank has one stage or a pair of them."""
    cuts = method["boundaries"]
    worst = max(method["peak_bytes"])
    for stage, (first, end) in enumerate(pairwise(cuts)):
        is_worst = has_peaks and method["peak_bytes"][stage] == worst
        axes.barh(
            -row, end - first, left=first, height=0.8, color=STAGE_COLOURS[stage % 2],
            edgecolor=CUT_COLOUR, linewidth=1.6 if is_worst else 0.6,
        )  # fmt: skip
        if has_peaks and (end - first) > 0.04 * cuts[-1]:
            axes.text(
                (first + end) / 2, -row, number(method["peak_bytes"][stage] / MIB), ha="center", va="center",
                fontsize=scaled_pt(figure, 7), color=TEXT_COLOUR, fontweight="bold" if is_worst else "normal",
            )  # fmt: skip


def _label_rows(axes: Axes, figure: Figure, methods: list[dict[str, Any]], layers: list[dict[str, Any]]) -> None:
    worst = [max(method["peak_bytes"]) / MIB for method in methods]
    axes.set_yticks(
        [-row for row in range(len(methods))],
        [f"{method['method']}  {number(peak)} MiB" for method, peak in zip(methods, worst, strict=True)],
    )
    axes.set_xlim(0, len(layers))
    if len(layers) <= MAX_NAMES:
        places = np.arange(len(layers)) + 0.5
        axes.set_xticks(places, [layer["name"] for layer in layers], rotation=90)
    axes.set_xlabel(
        "layers, first to last; in each stage the peak of its rank (MiB), the largest framed",
        fontsize=scaled_pt(figure, 8), color=TEXT_COLOUR,
    )  # fmt: skip

"""The pictures of a scaling study.

They show rates and efficiencies with the best fit, and bands of predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.metrics.statistics import Interval
from analysis.plots.figure import (
    LINE_COLOURS,
    TEXT_COLOUR,
    WIDTH_IN,
    add_legend,
    label_counts,
    new_figure,
    set_title,
)
from analysis.scaling.fits import Fit, curve_ranks
from analysis.scaling.law import MAX_RATIO
from analysis.scaling.points import (
    Point,
    base_points,
    describe_base,
    may_join,
    most_real,
    rate_name,
    scaling_kind,
    title,
)
from gems.trace import SOURCES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {"measured": "o", "emulated": "s", "simulated": "^"}
SOURCE_NAMES = {
    "measured": "measured",
    "emulated": "emulated: real messages, timed waits for compute",
    "simulated": "simulated: a prediction",
}
MAX_TICKS = 14
FIT_WIDTH = 1.0
BAND = "extrapolation"
BAND_ALPHA = 0.15


def scaling_figure(points: Sequence[Point], fits: Sequence[Fit] = ()) -> Figure:
    """Build the picture of a scaling study: images/s above, parallel efficiency below, over ranks.

    Each line has a colour, and each source a marker. A line joins the most real point of each
    number of ranks; it is dashed if one of its ends is simulated, and left out if ranks are far
    apart. A dotted line extends from its base in proportion to the ranks. Bars are 95 % intervals
    of the median (the range, below 6 steps). The legend names the base of each line with its
    images/s. The law of each line is drawn over its points, and up to four times beyond them with a
    shaded 95 % band.
    """
    labels = (rate_name(points), "parallel efficiency, of 1")
    figure, (rate, share) = new_figure(
        WIDTH_IN, 7.6, 2, x="ranks", y=labels, has_grid=True, sharex=True, height_ratios=(3, 2)
    )
    bases = base_points(points)
    kind = scaling_kind(points)
    lines = list(dict.fromkeys(point.line for point in points))
    laws = {fit.line: fit for fit in fits}
    for place, line in enumerate(lines):
        line_points = [point for point in points if point.line == line]
        colour = LINE_COLOURS[place % len(LINE_COLOURS)]
        base = bases[line]
        fit = laws.get(line)
        # in capability scaling the images of the points differ, so one line of images/s would
        # mislead
        if kind != "capability":
            largest = max(
                *(point.ranks for point in line_points), fit.law.limit_ranks if fit else 0
            )
            span = np.array([base.ranks, largest])
            rate.plot(
                span, span / base.rank_s_per_image, color=colour, linewidth=0.8, linestyle=":"
            )
        draw_points(
            rate, {point: point.images_per_s_interval for point in line_points}, colour, kind
        )
        shares = {point: point.efficiency_interval(base) for point in line_points}
        draw_points(
            share,
            {point: bounds for point, bounds in shares.items() if bounds is not None},
            colour,
            kind,
        )
        if fit and kind != "capability":
            _draw_fit(rate, fit, colour)
        if fit:
            _draw_fit(share, fit, colour, base)
    rate.set_yscale("log")
    plain_ticks(rate)
    label_counts(
        share,
        [*(point.ranks for point in points), *(fit.law.limit_ranks for fit in fits)],
        MAX_TICKS,
    )
    share.axhline(1.0, color=TEXT_COLOUR, linewidth=0.8, linestyle=":")
    share.set_ylim(0.0, max(1.08, share.get_ylim()[1]))
    set_title(figure, rate, *title(points))
    _name_parts(figure, points, lines, bool(fits))
    return figure


def plain_ticks(axes: Axes) -> None:
    """Write rates as plain numbers, and also between decades if there are few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_points(axes: Axes, values: Mapping[Point, Interval], colour: str, kind: str) -> None:
    """Draw the points of a line with their bars, and join neighbours."""
    for point, after in pairwise(most_real(list(values))):
        if may_join(kind, point, after):
            style = (0, (4, 2)) if "simulated" in (point.source, after.source) else "-"
            ends = [values[point].value, values[after].value]
            axes.plot(
                [point.ranks, after.ranks], ends, color=colour, linewidth=1.3, linestyle=style
            )
    for point, bounds in values.items():
        reach = [[bounds.value - bounds.low], [bounds.high - bounds.value]]
        axes.errorbar(
            [point.ranks],
            [bounds.value],
            reach,
            **point_marks(point, colour),
            capsize=2,
            elinewidth=0.9,
        )


def _draw_fit(axes: Axes, fit: Fit, colour: str, base: Point | None = None) -> None:
    """Draw images/s by a law, or with `base` the efficiency.

    The curve is drawn over the points, and with a shaded band beyond them.
    """
    ranks = curve_ranks(fit)
    rates = [fit.images_per_s(count) for count in ranks.tolist()]
    curves = np.array([[rate.low, rate.value, rate.high] for rate in rates]).T
    if base is not None:
        curves *= base.rank_s_per_image / ranks
    low, value, high = curves
    axes.plot(ranks, value, color=colour, linewidth=FIT_WIDTH, linestyle="-.", alpha=0.8)
    beyond = ranks >= fit.law.last_ranks
    axes.fill_between(
        ranks[beyond],
        low[beyond],
        high[beyond],
        color=colour,
        alpha=BAND_ALPHA,
        linewidth=0,
        gid=BAND,
    )


def point_marks(point: Point, colour: str) -> dict[str, Any]:
    """Return the style of a point's marker, which shows its source and is open for predictions."""
    face = "none" if point.source == "simulated" else colour
    size = 7.0 if point.source == "simulated" else 5.0
    return {
        "marker": MARKERS[point.source],
        "color": colour,
        "markerfacecolor": face,
        "markersize": size,
        "linestyle": "none",
    }


def _name_parts(
    figure: Figure, points: Sequence[Point], lines: Sequence[str], has_fits: bool
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bases = base_points(points)
    handles: list[Artist] = [
        Line2D(
            [],
            [],
            color=LINE_COLOURS[place % len(LINE_COLOURS)],
            label=f"{line} (base {describe_base(bases[line])})",
        )
        for place, line in enumerate(lines)
    ]
    for source in SOURCES:
        match = next((point for point in points if point.source == source), None)
        if match is not None:
            handles.append(
                Line2D([], [], **point_marks(match, "#444444"), label=SOURCE_NAMES[source])
            )
    handles.append(
        Line2D(
            [], [], color="#444444", linewidth=0.8, linestyle=":", label="ideal, from the base on"
        )
    )
    if has_fits:
        handles += [
            Line2D(
                [],
                [],
                color="#444444",
                linewidth=FIT_WIDTH,
                linestyle="-.",
                label="law of scaling, fitted",
            ),
            Patch(
                color="#444444",
                alpha=BAND_ALPHA,
                linewidth=0,
                label=f"extrapolated, at most {MAX_RATIO:.0f} times beyond the data: 95 % band",
            ),
        ]
    add_legend(figure, handles)

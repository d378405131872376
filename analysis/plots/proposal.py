"""The page of a proposal for compute time.

Strong and weak scaling, a table, what is asked for, and the method.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.plots.figure import DPI, LINE_COLOURS, SOURCE_MARKS, TEXT_COLOUR, label_counts
from analysis.plots.scaling import SOURCE_NAMES, draw_points, plain_ticks, point_marks
from analysis.scaling.proposal import STRONG, WEAK, Proposal, Series
from gems.trace import SOURCES
from gems.utils.units import UNKNOWN, number, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_IN = (8.27, 11.69)  # A4
LEFT_IN = 0.55
RIGHT_IN = 0.41
TOP_IN = 0.5
BOTTOM_IN = 0.4
PANEL_IN = (3.05, 3.0)
LINE_IN = 0.145
CELL_PT = 6.6
SMALL_PT = 7.0
TEXT_PT = 8.0
# of a line of small text, and of bold text
CHARACTERS = 142
BOLD_CHARACTERS = 106
MAX_SERIES = 4  # of a kind: the page has room for these, and the CSV for all
MAX_NAME = 44
MAX_METHOD_LINES = 16
TITLES = {
    STRONG: ("Strong scaling: fixed images a step", "images/s"),
    WEAK: ("Weak scaling: fixed images a GPU", "step, median [{}]"),
}
# Columns of the table: heading, and where it ends (texts: begins), of the page's width.
COLUMNS = {
    "scaling": 0.066,
    "series": 0.12,
    "source": 0.4,
    "GPUs": 0.505,
    "step": 0.567,
    "interval": 0.653,
    "images/s": 0.72,
    "efficiency [%]": 0.813,
    "interval ": 0.88,
    "GPU-hours": 0.95,
}
TEXT_COLUMNS = ("scaling", "series", "source")
ASKED_COLUMN = "GPU-hours"


def proposal_figure(proposal: Proposal) -> Figure:
    """Build the page, A4: what does not fit in the table is left to the CSV, and said so."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=PAGE_IN, dpi=DPI)
    height = PAGE_IN[1]
    shown = [
        each
        for kind in (STRONG, WEAK)
        for each in [each for each in proposal.series if each.kind == kind][:MAX_SERIES]
    ]
    marks = " and ".join(SOURCE_MARKS[source] for source in SOURCES if source in proposal.sources)
    _write(figure, TOP_IN, "Scaling, for a compute-time proposal", size=13, weight="bold")
    _write(figure, TOP_IN + 0.24, f"All figures: {marks}.", size=TEXT_PT)
    top = TOP_IN + 0.85
    for place, kind in enumerate((STRONG, WEAK)):
        left = LEFT_IN + 0.25 + place * (PANEL_IN[0] + 0.8)
        box = (
            left / PAGE_IN[0],
            1 - (top + PANEL_IN[1]) / height,
            PANEL_IN[0] / PAGE_IN[0],
            PANEL_IN[1] / height,
        )
        _draw_panel(figure.add_axes(box), kind, [each for each in shown if each.kind == kind])
    used = top + PANEL_IN[1] + 0.5
    used = _draw_legend(figure, used, shown) + 0.25
    notes = [line for text in proposal.missing for line in textwrap.wrap(text, CHARACTERS)]
    request = textwrap.wrap(f"Asked for: {proposal.request}", BOLD_CHARACTERS)
    more = " ... (--json has all of it)"
    method = textwrap.wrap(
        f"Method. {proposal.method}", CHARACTERS, max_lines=MAX_METHOD_LINES, placeholder=more
    )
    tail = LINE_IN * (len(notes) + len(request) + len(method) + 5)
    max_rows = max(3, int((height - BOTTOM_IN - tail - used) / LINE_IN))
    names = {(each.kind, each.name) for each in shown}
    rows = sorted(proposal.rows, key=lambda row: (row["scaling"], row["series"]) not in names)
    used = _draw_table(figure, used, rows, max_rows)
    for lines, style in (
        (notes, {"size": SMALL_PT, "style": "italic"}),
        (request, {"size": TEXT_PT, "weight": "bold"}),
        (method, {"size": SMALL_PT}),
    ):
        for line in lines:
            _write(figure, used, line, **style)
            used += LINE_IN
        used += LINE_IN if lines else 0
    return figure


def _write(
    figure: Figure, down_in: float, text: str, at: float = LEFT_IN / PAGE_IN[0], **style: Any
) -> None:
    """Write a line whose top is so far down the page."""
    figure.text(
        at,
        1 - down_in / PAGE_IN[1],
        text,
        **{"color": TEXT_COLOUR, "va": "top", "parse_math": False, **style},
    )


def _draw_panel(axes: Axes, kind: str, series: Sequence[Series]) -> None:
    """Draw the series of a kind with their ideal lines, from the base on."""
    headline, label = TITLES[kind]
    axes.set_title(headline, loc="left", fontsize=TEXT_PT, color=TEXT_COLOUR, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL_PT, colors=TEXT_COLOUR)
    if not series:
        axes.set_axis_off()
        axes.text(
            0.5,
            0.5,
            f"no {kind} scaling in these runs",
            ha="center",
            fontsize=TEXT_PT,
            color=TEXT_COLOUR,
        )
        return
    axes.grid(True, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    unit = time_unit([point.step_median_s for each in series for point in each.points])
    for each, colour in zip(series, LINE_COLOURS, strict=False):
        ends = np.array([each.base.ranks, max(point.ranks for point in each.points)])
        if kind == STRONG:
            ideal = [each.ideal_images_per_s(ranks) for ranks in ends.tolist()]
            bounds = {point: point.images_per_s_interval for point in each.points}
        else:
            ideal = [each.base.step_median_s / unit.size] * 2
            bounds = {point: point.step_interval_s.scaled(1 / unit.size) for point in each.points}
        axes.plot(ends, ideal, color=colour, linewidth=0.9, linestyle=":")
        draw_points(axes, bounds, colour, kind)
    if kind == STRONG:
        axes.set_yscale("log")
        plain_ticks(axes)
    else:
        axes.set_ylim(0.0, 1.15 * axes.get_ylim()[1])
    label_counts(axes, (point.ranks for each in series for point in each.points), 9)
    axes.set_xlabel("GPUs (ranks)", fontsize=SMALL_PT, color=TEXT_COLOUR)
    axes.set_ylabel(label.format(unit.name), fontsize=SMALL_PT, color=TEXT_COLOUR)


def _draw_legend(figure: Figure, down_in: float, series: Sequence[Series]) -> float:
    """Write the legend, and return how far down the page it ends."""
    from matplotlib.lines import Line2D

    handles: list[Line2D] = []
    for kind in (STRONG, WEAK):
        mine = [each for each in series if each.kind == kind]
        for each, colour in zip(mine, LINE_COLOURS, strict=False):
            handles.append(Line2D([], [], color=colour, label=f"{kind}: {each.name}"))
    first = {point.source: point for each in series for point in each.points}
    for source, point in first.items():
        handles.append(Line2D([], [], **point_marks(point, "#444444"), label=SOURCE_NAMES[source]))
    handles.append(
        Line2D(
            [], [], color="#444444", linewidth=0.9, linestyle=":", label="ideal, from the base on"
        )
    )
    rows = -(-len(handles) // 2)
    box = (LEFT_IN / PAGE_IN[0], 1 - down_in / PAGE_IN[1])
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=box,
        ncols=2,
        fontsize=SMALL_PT,
        frameon=False,
        borderaxespad=0.0,
    )
    return down_in + LINE_IN * (rows + 1)


def _draw_table(
    figure: Figure, down_in: float, rows: Sequence[dict[str, Any]], max_rows: int
) -> float:
    """Write the first rows, and return how far down the page they end."""
    from matplotlib.lines import Line2D

    unit = time_unit([row["step_s"] for row in rows])
    shown = rows if len(rows) <= max_rows else rows[: max_rows - 1]
    heads: dict[str, Any] = {name: name for name in COLUMNS} | {"step": f"step [{unit.name}]"}
    cells = [heads, *(_cells(row, unit.size) for row in shown)]
    for place, cell in enumerate(cells):
        for name, at in COLUMNS.items():
            align = "left" if name in TEXT_COLUMNS else "right"
            is_bold = not place or (cell["is_asked"] and name == ASKED_COLUMN)
            style = {"ha": align, "size": CELL_PT, "weight": "bold" if is_bold else "normal"}
            _write(figure, down_in, cell[name], at, **style)
        down_in += LINE_IN
        if not place:
            y = 1 - (down_in - 0.02) / PAGE_IN[1]
            rule = [LEFT_IN / PAGE_IN[0], 1 - RIGHT_IN / PAGE_IN[0]]
            figure.add_artist(Line2D(rule, [y, y], color=TEXT_COLOUR, linewidth=0.6))
    if len(shown) < len(rows):
        _write(
            figure,
            down_in,
            f"and {len(rows) - len(shown)} more points, in the CSV",
            size=SMALL_PT,
            style="italic",
        )
        down_in += LINE_IN
    return down_in + LINE_IN


def _cells(row: dict[str, Any], unit_s: float) -> dict[str, Any]:
    """Return a row as texts; the base's efficiency, and steps that are all alike, have no interval."""
    is_range = row["bounds"] == "range"

    def between(name: str, size: float) -> str:
        low, high = (row[f"{name}_{end}"] for end in ("low", "high"))
        if low is None or low == high:
            return UNKNOWN
        ends = [number(end / size) for end in (low, high)]
        is_exact = (
            row["source"] == "simulated" and ends[0] == ends[1]
        )  # but for the trace's nanoseconds
        return UNKNOWN if is_exact else (" to " if is_range else "-").join(ends)

    share = row["parallel_efficiency"]
    name = textwrap.shorten(row["series"], MAX_NAME, placeholder=" ...")
    texts = (
        row["scaling"],
        name,
        row["source"],
        str(row["ranks"]),
        number(row["step_s"] / unit_s),
        between("step_s", unit_s),
        number(row["images_per_s"]),
        UNKNOWN if share is None else f"{100 * share:.1f}",
        between("parallel_efficiency", 0.01),
        number(row["gpu_hours"]),
    )
    return dict(zip(COLUMNS, texts, strict=True)) | {"is_asked": row["is_asked"]}

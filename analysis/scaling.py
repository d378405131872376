"""The scaling study: images/s and parallel efficiency over ranks, as a picture and a CSV, from traces of runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.efficiency import Point, agreements, bases_of, kind_of, read_points, rows_of
from analysis.figure import DPI, TEXT_COLOUR, WIDTH_IN, save_figure, set_title
from analysis.units import counted, number, time_unit
from gems.errors import ConfigError
from gems.trace import SOURCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
MARKERS = {"measured": "o", "emulated": "s", "simulated": "^"}
SOURCE_WORDS = {
    "measured": "measured",
    "emulated": "emulated: real messages, timed waits for compute",
    "simulated": "simulated: a prediction",
}
STEM = "scaling"
PICTURES = (".png", ".pdf")
MAX_TICKS = 14


@dataclass(frozen=True, slots=True)
class Study:
    """What was read and the files that were written."""

    points: list[Point]
    csv: Path
    pictures: list[Path]


def write_study(paths: Sequence[Path], out: Path) -> Study:
    """Reads runs, writes scaling.png, scaling.pdf and scaling.csv into the folder `out`, which is made.

    Raises:
        ConfigError: a run that cannot be read, or a folder that cannot be written.
    """
    points = read_points(paths)
    try:
        out.mkdir(parents=True, exist_ok=True)
        table = write_csv(points, out / f"{STEM}.csv")
    except OSError as error:
        raise ConfigError("out", out, f"cannot be written ({error.strerror or error})") from error
    figure = scaling_figure(points)
    pictures = [out / f"{STEM}{suffix}" for suffix in PICTURES]
    for picture in pictures:
        save_figure(figure, picture)
    return Study(points, table, pictures)


def write_csv(points: Sequence[Point], path: Path) -> Path:
    """Writes the table of `rows_of`, one line a point, an empty field where a figure is not known."""
    rows = rows_of(points)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def scaling_figure(points: Sequence[Point]) -> Figure:
    """Builds the picture: images/s above, parallel efficiency below, over ranks.

    One colour a line, one marker a source. A line joins the most real point of each number of ranks, dashed where
    an end of it is simulated; a dotted line goes on from its base in proportion to the ranks. Bars reach from the slowest to
    the fastest step. The base of each line is in the legend, with its images/s.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, (rate, share) = _panels()
    bases, kind = bases_of(points), kind_of(points)
    lines = list(dict.fromkeys(point.line for point in points))
    for place, line in enumerate(lines):
        mine = [point for point in points if point.line == line]
        colour = COLOURS[place % len(COLOURS)]
        _draw_rates(rate, mine, bases[line], colour, has_ideal=kind != "capability")
        _draw_shares(share, mine, bases[line], colour)
    ranks = sorted({point.ranks for point in points})
    if len(ranks) > 1:
        rate.set_xscale("log", base=2)
    rate.set_yscale("log")
    ticks = ranks if len(ranks) <= MAX_TICKS else ranks[:: -(-len(ranks) // MAX_TICKS)]
    share.xaxis.set_major_locator(FixedLocator(ticks))
    share.xaxis.set_minor_locator(NullLocator())
    share.set_xticks(ticks, [str(rank) for rank in ticks])
    share.axhline(1.0, color=TEXT_COLOUR, linewidth=0.8, linestyle=":")
    share.set_ylim(0.0, max(1.08, share.get_ylim()[1]))
    set_title(figure, rate, *title(points))
    _add_legend(figure, points, lines)
    return figure


def title(points: Sequence[Point]) -> tuple[str, str]:
    """Gives the headline, which names the kind of scaling, and the line below it."""
    kind, first = kind_of(points), points[0]
    kinds = {
        "strong": f"strong scaling, {first.images_per_step} images a step",
        "weak": f"weak scaling, {first.images_per_step / first.ranks:g} images a rank",
        "capability": "capability scaling, the work of an image grows",
        "comparison": f"schedules on {counted(first.ranks, 'rank')}",
        "mixed": "scaling, images a step and ranks change apart",
    }
    return kinds[kind], _detail(points)


def _detail(points: Sequence[Point]) -> str:
    found = agreements(points)
    detail = "median step, bars from slowest to fastest, warm-up left out"
    if not found:
        return detail
    low, high = (round(100 * pick(each.error for each in found), 1) + 0.0 for pick in (min, max))  # no "-0.0"
    return f"{detail}; simulated step times are off by {low:+.1f} to {high:+.1f} % ({counted(len(found), 'point')})"


def study_table(points: Sequence[Point]) -> str:
    """Gives the table for people: a line a point; efficiencies in %."""
    unit = time_unit([point.step_median_s for point in points])
    head = ("schedule", "source", "ranks", "images/s", f"step [{unit.name}]", "parallel [%]", "compute [%]")
    rows = [head]
    for row in rows_of(points):
        shares = (row["parallel_efficiency"], row["compute_efficiency"])
        rows.append(
            (
                row["schedule"], row["source"], str(row["ranks"]), number(row["images_per_s"]),
                unit.show(row["step_median_s"]), *("-" if value is None else f"{100 * value:.1f}" for value in shares),
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    shown = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    bases = [f"base of {line}: {_base_words(base)}" for line, base in bases_of(points).items()]
    return "\n".join([title(points)[0], *shown, *sorted(bases)])


def _base_words(base: Point) -> str:
    return f"{number(base.images_per_s)} images/s on {counted(base.ranks, 'rank')}, {base.source}"


def _panels() -> tuple[Figure, tuple[Axes, Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, 7.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    rate, share = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, label in ((rate, "images/s"), (share, "parallel efficiency, of 1")):
        axes.set_ylabel(label, fontsize=9, color=TEXT_COLOUR)
        axes.tick_params(labelsize=8, colors=TEXT_COLOUR)
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    share.set_xlabel("ranks", fontsize=9, color=TEXT_COLOUR)
    return figure, (rate, share)


def _draw_rates(axes: Axes, mine: Sequence[Point], base: Point, colour: str, *, has_ideal: bool) -> None:
    if has_ideal:
        span = [base.ranks, max(point.ranks for point in mine)]
        ideal = [base.images_per_s * ranks / base.ranks for ranks in span]
        axes.plot(span, ideal, color=colour, linewidth=0.8, linestyle=":")
    _join(axes, [(point, point.images_per_s) for point in _most_real(mine)], colour)
    for point in mine:
        slow, fast = (point.images_per_step / pick(point.step_s) for pick in (max, min))
        reach = [[point.images_per_s - slow], [fast - point.images_per_s]]
        axes.errorbar(
            [point.ranks], [point.images_per_s], reach, **_marks(point, colour), capsize=2, elinewidth=0.9
        )


def _draw_shares(axes: Axes, mine: Sequence[Point], base: Point, colour: str) -> None:
    shares = {point: share for point in mine if (share := point.efficiency(base)) is not None}
    _join(axes, [(point, shares[point]) for point in _most_real(list(shares))], colour)
    for point, share in shares.items():
        axes.plot([point.ranks], [share], **_marks(point, colour))


def _join(axes: Axes, places: Sequence[tuple[Point, float]], colour: str) -> None:
    for (point, value), (after, value_after) in pairwise(places):
        is_predicted = "simulated" in (point.source, after.source)
        axes.plot(
            [point.ranks, after.ranks], [value, value_after],
            color=colour, linewidth=1.3, linestyle=(0, (4, 2)) if is_predicted else "-",
        )  # fmt: skip


def _most_real(points: Sequence[Point]) -> list[Point]:
    """Gives one point for each number of ranks, measured before emulated before simulated."""
    best: dict[int, Point] = {}
    for point in sorted(points, key=lambda point: (point.ranks, SOURCES.index(point.source))):
        best.setdefault(point.ranks, point)
    return list(best.values())


def _marks(point: Point, colour: str) -> dict[str, Any]:
    face = "none" if point.source == "simulated" else colour
    size = 7.0 if point.source == "simulated" else 5.0
    return {
        "marker": MARKERS[point.source], "color": colour, "markerfacecolor": face, "markersize": size,
        "linestyle": "none",
    }  # fmt: skip


def _add_legend(figure: Figure, points: Sequence[Point], lines: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    bases = bases_of(points)
    handles = [
        Line2D([], [], color=COLOURS[place % len(COLOURS)], label=f"{line} (base {_base_words(bases[line])})")
        for place, line in enumerate(lines)
    ]
    for source in SOURCES:
        found = next((point for point in points if point.source == source), None)
        if found is not None:
            handles.append(Line2D([], [], **_marks(found, "#444444"), label=SOURCE_WORDS[source]))
    handles.append(
        Line2D([], [], color="#444444", linewidth=0.8, linestyle=":", label="ideal, from the base on")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=7.5, frameon=False)

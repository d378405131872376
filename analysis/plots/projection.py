"""The picture of a projection: efficiency with its band beside published figures, and its sensitivities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.io.files import write_csv
from analysis.plots.figure import TEXT_COLOUR, WIDTH_IN, empty_figure, save_figure, set_title, style_axes
from analysis.scaling.projection import SHARE, Projection, Sensitivity, describe_error, place_rows, sensitivity_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
STEM, TABLE = "projection", "sensitivity"
PICTURES = (".png", ".pdf")


def write_projection(found: Projection, out: Path) -> list[Path]:
    """Write projection.png, .pdf and .csv, and sensitivity.csv, into a folder, and return their paths.

    Raises:
        ConfigError: a picture that cannot be written.
    """
    tables = [
        write_csv(place_rows(found), out / f"{STEM}.csv"),
        write_csv(sensitivity_rows(found), out / f"{TABLE}.csv"),
    ]
    figure = projection_figure(found)
    pictures = [out / f"{STEM}{suffix}" for suffix in PICTURES]
    for picture in pictures:
        save_figure(figure, picture)
    return [*pictures, *tables]


def projection_figure(found: Projection) -> Figure:
    """Build the picture: efficiency over ranks with its bands on the left, sensitivities on the right."""
    figure = empty_figure(1.25 * WIDTH_IN, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    lines = list(dict.fromkeys(place.point.line for place in found.places))
    colours = {line: COLOURS[number % len(COLOURS)] for number, line in enumerate(lines)}
    for line in lines:
        _draw_line(left, found, line, colours[line])
    _set_ranks(left, sorted({place.point.ranks for place in found.places}))
    _draw_sensitivities(right, found.sensitivities, colours)
    style_axes((left, right), 8, has_grid=True)
    left.set_xlabel("ranks", fontsize=9, color=TEXT_COLOUR)
    left.set_ylabel("parallel efficiency [%]", fontsize=9, color=TEXT_COLOUR)
    left.legend(fontsize=7.5, frameon=False, loc="lower left")
    detail = f"{describe_error(found)}; bands: 95 % of draws, all constants off by up to {SHARE:.0%}"
    set_title(figure, left, "SIMULATED, a prediction: scaling efficiency", detail)
    return figure


def _draw_line(axes: Axes, found: Projection, line: str, colour: str) -> None:
    mine = [place for place in found.places if place.point.line == line]
    ranks = [place.point.ranks for place in mine]
    axes.fill_between(
        ranks, [100 * place.low for place in mine], [100 * place.high for place in mine],
        color=colour, alpha=0.2, linewidth=0,
    )  # fmt: skip
    base = mine[0].point
    axes.plot(
        ranks, [100 * place.efficiency for place in mine], color=colour, linewidth=1.3, linestyle=(0, (4, 2)),
        marker="^",
        markerfacecolor="none", label=f"{line} (base {base.images_per_s:.3g} images/s on {base.ranks} ranks)",
    )  # fmt: skip
    for place in mine:
        if place.published is not None:
            value = 100 * place.published.efficiency
            words = f"published for {line}: {value:.2f} % on {place.point.ranks}\n({place.published.source})"
            axes.plot(
                [place.point.ranks], [value], color=colour, marker="*", markersize=12, linestyle="none", label=words
            )  # fmt: skip


def _set_ranks(axes: Axes, ranks: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(rank) for rank in ranks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    low = axes.get_ylim()[0]
    axes.set_ylim(low - 0.6 * (100 - low), 100.5)  # room for the legend


def _draw_sensitivities(axes: Axes, found: Sequence[Sensitivity], colours: dict[str, str]) -> None:
    """Draw a bar a line and constant, from the efficiency with less of it to that with more."""
    names = [f"{each.constant.removeprefix('machine.')} ({each.value:.3g})" for each in found]
    for place, each in enumerate(found):
        low, high = sorted((100 * each.less, 100 * each.more))
        axes.barh(place, high - low, left=low, color=colours[each.line], height=0.6)
        axes.plot([low, high], [place, place], color=colours[each.line], marker="|", linestyle="none")
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    ranks = " and ".join(dict.fromkeys(str(each.ranks) for each in found))
    axes.set_xlabel(
        f"efficiency [%] on {ranks} ranks, constant {SHARE:.0%} less or more", fontsize=9, color=TEXT_COLOUR
    )

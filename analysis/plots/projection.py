"""The picture and tables of a projection: efficiency with its band beside what is published, and what it hangs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.io.csv_file import write_csv
from analysis.plots.figure import DPI, TEXT_COLOUR, WIDTH_IN, error_words, save_figure, set_title
from analysis.scaling.projection import SHARE, Projection, Sensitivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
STEM, TABLE = "projection", "sensitivity"
PICTURES = (".png", ".pdf")


def write_projection(found: Projection, out: Path) -> list[Path]:
    """Write projection.png, .pdf and .csv, and sensitivity.csv, into a folder; gives their paths.

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


def place_rows(found: Projection) -> list[dict[str, Any]]:
    """Return a row a point; efficiencies are of 1."""
    return [
        {
            "schedule": place.point.line,
            "source": place.point.source,
            "ranks": place.point.ranks,
            "images_per_s": place.point.images_per_s,
            "parallel_efficiency": place.efficiency,
            "band_low": place.low,
            "band_high": place.high,
            "published_efficiency": None if place.published is None else place.published.efficiency,
            "published_source": "" if place.published is None else place.published.source,
            "calibrated_from": found.calibrated_from,
            "held_out_error": found.held_out_error,
        }
        for place in found.places
    ]


def sensitivity_rows(found: Projection) -> list[dict[str, Any]]:
    """Return a row a line and constant; efficiencies are of 1, of the largest point of the line."""
    return [
        {
            "schedule": each.line, "ranks": each.ranks, "constant": each.constant, "value": each.value,
            f"efficiency_less_{SHARE:.0%}": each.less, f"efficiency_more_{SHARE:.0%}": each.more,
        }
        for each in found.sensitivities
    ]  # fmt: skip


def projection_table(found: Projection) -> str:
    """Return both tables for people, in %."""
    lines = [f"simulated on constants from {found.calibrated_from}; {_error_words(found)}"]
    for place in found.places:
        beside = place.published
        words = f"   published {100 * beside.efficiency:.2f} ({beside.source})" if beside else ""
        lines.append(
            f"{place.point.line:<32}{place.point.ranks:>6} ranks  {100 * place.efficiency:6.2f} %"
            f"  band {100 * place.low:.2f} to {100 * place.high:.2f}{words}"
        )
    lines.append(f"efficiency [%] of the largest points with a constant {SHARE:.0%} less, {SHARE:.0%} more")
    lines += [
        f"{each.line:<32}{each.ranks:>6} ranks  {each.constant:<26}{each.value:>10.4g}"
        f"{100 * each.less:>9.2f}{100 * each.more:>9.2f}"
        for each in found.sensitivities
    ]
    return "\n".join(lines)


def projection_figure(found: Projection) -> Figure:
    """Build the picture: efficiency over ranks with its bands on the left, sensitivities on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.25 * WIDTH_IN, 4.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    lines = list(dict.fromkeys(place.point.line for place in found.places))
    colours = {line: COLOURS[number % len(COLOURS)] for number, line in enumerate(lines)}
    for line in lines:
        _draw_line(left, found, line, colours[line])
    _set_ranks(left, sorted({place.point.ranks for place in found.places}))
    _draw_sensitivities(right, found.sensitivities, colours)
    for axes in (left, right):
        axes.tick_params(labelsize=8, colors=TEXT_COLOUR)
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    left.set_xlabel("ranks", fontsize=9, color=TEXT_COLOUR)
    left.set_ylabel("parallel efficiency [%]", fontsize=9, color=TEXT_COLOUR)
    left.legend(fontsize=7.5, frameon=False, loc="lower left")
    detail = f"{_error_words(found)}; bands: 95 % of draws, all constants off by up to {SHARE:.0%}"
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
        ranks, [100 * place.efficiency for place in mine], color=colour, linewidth=1.3, linestyle=(0, (4, 2)), marker="^",
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


def _error_words(found: Projection) -> str:
    if found.held_out_error is None:
        return "not checked against runs on that machine"
    return error_words(found.held_out_error)

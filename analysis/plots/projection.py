"""The picture of a projection: efficiency with its band beside published figures, and its sensitivities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis.plots.figure import LINE_COLOURS, WIDTH_IN, label_axes, label_counts, new_figure, scaled_pt, set_title
from analysis.scaling.projection import SHARE, Place, Projection, describe_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def projection_figure(found: Projection) -> Figure:
    """Build the picture: efficiency over ranks with its bands on the left, sensitivities on the right."""
    figure, (left, right) = new_figure(1.25 * WIDTH_IN, 4.6, 1, 2, has_grid=True, width_ratios=(3, 2))
    lines = dict.fromkeys(place.point.line for place in found.places)
    colours = {line: LINE_COLOURS[number % len(LINE_COLOURS)] for number, line in enumerate(lines)}
    for line, colour in colours.items():
        _draw_line(left, [place for place in found.places if place.point.line == line], colour)
    label_counts(left, (place.point.ranks for place in found.places))
    low = left.get_ylim()[0]
    left.set_ylim(low - 0.6 * (100 - low), 100.5)  # room for the legend
    left.legend(fontsize=scaled_pt(figure, 7.5), frameon=False, loc="lower left")
    label_axes(figure, left, "ranks", "parallel efficiency [%]")
    for row, each in enumerate(found.sensitivities):  # from the efficiency with less of a constant to that with more
        low, high = sorted((100 * each.less, 100 * each.more))
        right.barh(row, high - low, left=low, color=colours[each.line], height=0.6)
        right.plot([low, high], [row, row], color=colours[each.line], marker="|", linestyle="none")
    names = [f"{each.constant.removeprefix('machine.')} ({each.value:.3g})" for each in found.sensitivities]
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    ranks = " and ".join(dict.fromkeys(str(each.ranks) for each in found.sensitivities))
    label_axes(figure, right, f"efficiency [%] on {ranks} ranks, constant {SHARE:.0%} less or more")
    detail = f"{describe_error(found)}; bands: 95 % of draws, all constants off by up to {SHARE:.0%}"
    set_title(figure, left, "SIMULATED, a prediction: scaling efficiency", detail)
    return figure


def _draw_line(axes: Axes, places: Sequence[Place], colour: str) -> None:
    base, line, ranks = places[0].point, places[0].point.line, [place.point.ranks for place in places]
    lows, values, highs = ([100 * getattr(place, name) for place in places] for name in ("low", "efficiency", "high"))
    axes.fill_between(ranks, lows, highs, color=colour, alpha=0.2, linewidth=0)
    axes.plot(
        ranks, values, color=colour, linewidth=1.3, linestyle=(0, (4, 2)), marker="^", markerfacecolor="none",
        label=f"{line} (base {base.images_per_s:.3g} images/s on {base.ranks} ranks)",
    )  # fmt: skip
    for place in places:
        if place.published is not None:
            value = 100 * place.published.efficiency
            label = f"published for {line}: {value:.2f} % on {place.point.ranks}\n({place.published.source})"
            axes.plot(
                [place.point.ranks], [value], color=colour, marker="*", markersize=12, linestyle="none", label=label
            )

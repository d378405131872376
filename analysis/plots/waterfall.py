"""The waterfall picture: from the ideal to the measured time of a step, a bar per cause of loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.attribution.causes import CAUSES, LABELS, Attribution
from analysis.plots.figure import SOURCE_MARKS, TEXT_COLOUR, WIDTH_IN, new_figure, set_title
from gems.utils.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "bubble": "#b3b3b3",
    "imbalance": "#c94f07",
    "point_to_point": "#5e3c99",
    "all_reduce": "#9a6fb0",
    "memory": "#117a8b",
    "recompute": "#6b3f8f",
    "input": "#e377a2",
    "host": "#4d4d4d",
    "noise": "#b8860b",
}
IDEAL_COLOUR, STEP_COLOUR = "#2f7d32", "#1b5f9e"


def waterfall_figure(attribution: Attribution) -> Figure:
    """Build the picture: the ideal time, then each cause, then the step's time.

    The bar of a cause begins where the one before it ended; a cause that saved time goes back. Each
    bar is labelled with its time and its share of the step.
    """
    unit = attribution.unit
    figure, (axes,) = new_figure(WIDTH_IN, 4.2, x=f"time of a step ({unit.name})")
    bars = [("ideal", attribution.ideal_s, IDEAL_COLOUR)]
    bars += [(LABELS[cause], attribution.run_s[cause], COLOURS[cause]) for cause in CAUSES]
    bars.append(("step", attribution.step_s, STEP_COLOUR))
    reached = 0.0
    for row, (name, time_s, colour) in enumerate(bars):
        is_whole = name in ("ideal", "step")
        begin = 0.0 if is_whole else reached
        axes.barh(row, time_s / unit.size, left=begin / unit.size, height=0.72, color=colour)
        if row:
            axes.plot(
                [reached / unit.size] * 2, [row - 1.36, row + 0.36], color="#bbbbbb", linewidth=0.8
            )
        reached = begin + time_s
        share = time_s / attribution.step_s if attribution.step_s else 0.0
        axes.annotate(
            f"{time_s / unit.size:.3g} {unit.name}, {100 * share:.1f} %",
            (max(begin, reached) / unit.size, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=TEXT_COLOUR,
        )
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    low = min(0.0, *(time_s for _, time_s, _ in bars))
    axes.set_xlim(
        low / unit.size, 1.18 * attribution.step_s / unit.size if attribution.step_s else 1.0
    )
    source = SOURCE_MARKS.get(attribution.source, attribution.source)
    set_title(
        figure,
        axes,
        f"Where the time of a step goes: {source}",
        f"mean of {counted(attribution.num_steps, 'step')} "
        f"over {counted(len(attribution.causes_s['bubble']), 'rank')}, "
        f"{100 * attribution.efficiency:.1f} % of it ideal",
    )
    return figure

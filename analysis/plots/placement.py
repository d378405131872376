"""The picture of a placement: which device runs which operator when, forward and backward of one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.plots.figure import TEXT_COLOUR, WIDTH_IN, draw_answer_file, new_figure, scaled_pt, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_IN, FRAME_IN = 0.55, 1.4
COLOURS = {"forward": "#0072b2", "backward": "#e69f00"}


def draw_placement(path: Path, out: Path) -> None:
    """Draw the answer of `gems place --json`, see `draw_answer_file`."""
    draw_answer_file(path, out, "placement", "gems place", placement_figure)


def placement_figure(answer: dict[str, Any]) -> Figure:
    """Build the figure: a row a device, a bar an operator's forward or backward."""
    figure, (axes,) = new_figure(WIDTH_IN, FRAME_IN + ROW_IN * answer["devices"])
    for way, colour in COLOURS.items():
        for device in range(answer["devices"]):
            rows = [row for row in answer["placement"] if row["device"] == device]
            spans = [(row[f"{way}_start_s"] * 1e3, row[f"{way}_s"] * 1e3) for row in rows]
            axes.broken_barh(
                spans, (-device - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.3,
                label=way if not device else None,
            )  # fmt: skip
    axes.set_yticks(
        [-device for device in range(answer["devices"])], [f"device {device}" for device in range(answer["devices"])]
    )
    axes.set_xlim(0, answer["step_s"] * 1e3)
    axes.legend(fontsize=scaled_pt(figure, 8), frameon=False, labelcolor=TEXT_COLOUR, ncols=2, loc="lower right",
                bbox_to_anchor=(1.0, 1.0))  # fmt: skip
    proof = "optimal" if answer["optimal"] else f"within {100 * answer['gap']:.1f} % of the shortest"
    set_title(
        figure, axes,
        f"{answer['model']}: {answer['operators']} operators on {answer['devices']} devices, "
        f"{answer['speed_up']:.2f} times as fast as one",
        f"PREDICTED for {answer['machine']}; {proof}",
    )  # fmt: skip
    return figure

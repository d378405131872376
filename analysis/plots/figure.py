"""Set up and write figures; matplotlib is loaded at the first call, not at import."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.io.files import refuse_unwritable
from analysis.scaling.points import format_error
from gems.errors import ConfigError, one_of
from gems.trace import TIME_UNIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
WIDTH_IN = 9.0
FORMATS = (".png", ".pdf", ".svg")
TIME_AXIS = "time from the step's start (ms)"
TEXT_COLOUR = "#222222"
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
SOURCE_MARKS = {
    "measured": "measured",
    "emulated": "EMULATED compute",
    "simulated": "SIMULATED, a prediction",
}


def source_mark(source: str, attributes: Mapping[str, object]) -> str:
    """Return the text that marks the source of a picture's figures.

    It includes the error of predictions if that is known. `attributes` are the root attributes of
    the trace; predictions for a calibrated machine have `held_out_error`.
    """
    mark = SOURCE_MARKS.get(source, source)
    error = attributes.get("held_out_error")
    return (
        mark
        if source != "simulated" or error is None
        else f"{mark}; {format_error(float(str(error)))}"
    )


def new_figure(
    width_in: float,
    height_in: float,
    rows: int = 1,
    *,
    x: str = TIME_AXIS,
    y: Sequence[str] = (),
    size_pt: float = 8,
    has_grid: bool = False,
    **layout: Any,
) -> tuple[Figure, list[Axes]]:
    """Build a figure of panels without top and right frames and without pyplot's global state.

    `x` labels the lowest panel, and `y` the first panels. `size_pt` is the size of tick labels.
    `layout` is passed to `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, squeeze=False, **layout).flat)
    for axes in panels:
        axes.tick_params(labelsize=scaled_pt(figure, size_pt), colors=TEXT_COLOUR)
        axes.spines[["top", "right"]].set_visible(False)
        if has_grid:
            axes.grid(True, color="#e5e5e5", linewidth=0.6)
            axes.set_axisbelow(True)
    label_pt = scaled_pt(figure, size_pt + 1)
    panels[-1].set_xlabel(x, fontsize=label_pt, color=TEXT_COLOUR)
    for axes, text in zip(panels, y, strict=False):
        axes.set_ylabel(text, fontsize=label_pt, color=TEXT_COLOUR)
    return figure, panels


def scaled_pt(figure: Figure, size_pt: float) -> float:
    """Return a font size that looks the same in figures that are printed equally wide."""
    return size_pt * max(1.0, figure.get_figwidth() / WIDTH_IN)


def label_counts(axes: Axes, counts: Iterable[int], max_ticks: int = 99) -> None:
    """Scale an axis of ranks or devices by doublings, with a tick at each of the counts.

    If there are more than `max_ticks` counts, only every few get a tick.
    """
    from matplotlib.ticker import NullLocator

    ticks = sorted(set(counts))
    if len(ticks) > 1:
        axes.set_xscale("log", base=2)
    ticks = ticks[:: -(-len(ticks) // max_ticks)]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def add_legend(figure: Figure, handles: Sequence[Any], columns: int = 2, **style: Any) -> None:
    """Write a legend below the panels."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=scaled_pt(figure, 7.5),
        frameon=False,
        **style,
    )


def show_units(axes: Axes, attributes: Mapping[str, object]) -> None:
    """Show milliseconds on the time axis as units, if the trace's root attributes say so."""
    from matplotlib.ticker import FuncFormatter

    if TIME_UNIT in attributes:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time_ms, _: f"{time_ms / 1e3:g}"))
        axes.set_xlabel(TIME_AXIS.replace("(ms)", "(units)"))


def set_title(figure: Figure, axes: Axes, headline: str, detail: str) -> None:
    """Write a bold line with a detail line below it, left-aligned above the top panel."""
    axes.set_title(detail, loc="left", fontsize=scaled_pt(figure, 9), color=TEXT_COLOUR)
    axes.annotate(
        headline,
        (0, 1),
        (0, scaled_pt(figure, 19)),
        "axes fraction",
        "offset points",
        fontsize=scaled_pt(figure, 10),
        fontweight="bold",
        color=TEXT_COLOUR,
        annotation_clip=False,
    )


def check_picture_path(path: Path) -> None:
    """Refuse a path to which no picture can be written.

    Raises:
        ConfigError: The suffix is not .png, .pdf or .svg, or the folder does not exist.
    """
    if path.suffix not in FORMATS:
        raise ConfigError("out", path, f"suffix {path.suffix or 'missing'}: " + one_of(FORMATS))
    if not path.parent.is_dir():
        raise ConfigError("out", path, "its folder does not exist", "make the folder first")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as PNG at 150 dpi, PDF or SVG, depending on the suffix.

    Raises:
        ConfigError: The path is not a picture's or cannot be written.
    """
    check_picture_path(path)
    with refuse_unwritable(path):
        figure.savefig(path, dpi=DPI, facecolor="white")


def as_svg(figure: Figure) -> bytes:
    """Return the figure as the text of an SVG file."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", facecolor="white")
    return svg.getvalue()


def draw_answer_file(
    path: Path, out: Path, key: str, command: str, build: Callable[[dict[str, Any]], Figure]
) -> None:
    """Draw the answer of `command` in a file as a picture (PNG, PDF or SVG by the suffix).

    `key` names the file in errors.

    Raises:
        ConfigError: The file contains no such answer, or the picture cannot be written.
    """
    check_picture_path(out)
    try:
        figure = build(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(key, path, f"holds no answer of {command} ({error})") from error
    save_figure(figure, out)

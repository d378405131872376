"""A figure for a file: its set-up and its writing. matplotlib is loaded at the first call, not at import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.io.files import from_answer
from analysis.scaling.points import format_error
from gems.errors import ConfigError, one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
WIDTH_IN = 9.0
FORMATS = (".png", ".pdf", ".svg")
TEXT_COLOUR = "#222222"
SOURCE_MARKS = {"measured": "measured", "emulated": "EMULATED compute", "simulated": "SIMULATED, a prediction"}


def source_mark(source: str, attributes: Mapping[str, object]) -> str:
    """Return the text that marks the source of a picture's figures, with the error of predictions if it is known.

    `attributes` are the root attributes of the trace; a calibrated machine's predictions carry `held_out_error`.
    """
    mark, error = SOURCE_MARKS.get(source, source), attributes.get("held_out_error")
    return mark if source != "simulated" or error is None else f"{mark}; {format_error(float(str(error)))}"


def empty_figure(width_in: float, height_in: float) -> Figure:
    """Build a figure without axes on the Agg canvas, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(panels: Iterable[Axes], size_pt: float, *, has_grid: bool = False) -> None:
    """Set the size and colour of tick labels, and remove the frame above and to the right."""
    for axes in panels:
        axes.tick_params(labelsize=size_pt, colors=TEXT_COLOUR)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if has_grid:
            axes.grid(True, color="#e5e5e5", linewidth=0.6)
            axes.set_axisbelow(True)


def new_figure(width_in: float, height_in: float, num_panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Build a figure of stacked panels with common axes, time on the lowest."""
    figure = empty_figure(width_in, height_in)
    grid = figure.subplots(num_panels, 1, sharex=True, sharey=True, squeeze=False)
    panels: list[Axes] = list(grid[:, 0])
    style_axes(panels, scaled_pt(figure, 8))
    panels[-1].set_xlabel("time from the step's start (ms)", fontsize=scaled_pt(figure, 9), color=TEXT_COLOUR)
    return figure, panels


def scaled_pt(figure: Figure, size_pt: float) -> float:
    """Return a font size that reads alike when figures of all widths are printed equally wide."""
    return size_pt * figure.get_figwidth() / WIDTH_IN


def set_title(figure: Figure, axes: Axes, headline: str, detail: str) -> None:
    """Write a bold line and one below it above the top panel, from its left edge on."""
    axes.set_title(detail, loc="left", fontsize=scaled_pt(figure, 9), color=TEXT_COLOUR)
    axes.annotate(
        headline, (0, 1), (0, scaled_pt(figure, 19)), "axes fraction", "offset points",
        fontsize=scaled_pt(figure, 10), fontweight="bold", color=TEXT_COLOUR, annotation_clip=False,
    )  # fmt: skip


def check_picture_path(path: Path) -> None:
    """Refuse a path that no picture can be written to.

    Raises:
        ConfigError: another suffix than .png, .pdf or .svg, or no such folder.
    """
    if path.suffix not in FORMATS:
        raise ConfigError("out", path, f"suffix {path.suffix or 'missing'}: " + one_of(FORMATS))
    if not path.parent.is_dir():
        raise ConfigError("out", path, "its folder does not exist", "make the folder first")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure, PNG at 150 dpi, PDF or SVG by the suffix.

    Raises:
        ConfigError: the path is not one for a picture or cannot be written.
    """
    check_picture_path(path)
    try:
        figure.savefig(path, dpi=DPI, facecolor="white")
    except OSError as error:
        raise ConfigError("out", path, f"cannot be written ({error.strerror or error})") from error


def draw_answer_file(path: Path, out: Path, key: str, command: str, build: Callable[[dict[str, Any]], Figure]) -> None:
    """Draw an answer of `command` in a file, which `key` names, to a picture (PNG, PDF or SVG by the suffix).

    Raises:
        ConfigError: the file holds no such answer, or the picture cannot be written.
    """
    check_picture_path(out)
    save_figure(from_answer(path, key, command, build), out)

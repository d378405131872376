"""Curves over the steps of a trace: losses, the metrics of each validation, and step times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.io.run_config import run_facts
from analysis.metrics.run_metrics import step_times_s, table_unit
from analysis.plots.figure import LINE_COLOURS, WIDTH_IN, new_figure, set_title, source_mark
from gems.errors import ConfigError
from gems.trace import Trace
from gems.utils.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = "validation_"
LOSS = "validation_loss"
STEP_AXIS = "optimizer step"
# number of drawn points of the loss, which are means over neighbouring steps
MAX_POINTS = 2000


def validation_curves(trace: Trace) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the steps and the values of each validation metric, in the order of the run."""
    rows = trace.validations
    curves = {}
    for index, name in enumerate(trace.attributes.get("metrics", ())):
        curve = rows[rows["metric"] == index]
        if len(curve):
            curves[str(name)] = curve["step"], curve["value"]
    return curves


def learning_figure(trace: Trace) -> Figure:
    """Build the picture of losses, with a panel for the other metrics if training was validated.

    Raises:
        ConfigError: No step of the trace has a loss.
    """
    steps = trace.steps[np.isfinite(trace.steps["loss"])]
    if not len(steps):
        raise ConfigError("trace", trace.source, "its steps carry no loss")
    curves = validation_curves(trace)
    others = {name: curve for name, curve in curves.items() if name != LOSS}
    panels_in = 2 if others else 1
    figure, panels = new_figure(
        WIDTH_IN,
        1.2 + 2.2 * panels_in,
        panels_in,
        sharex=True,
        x=STEP_AXIS,
        y=("loss", "metric"),
        has_grid=True,
    )
    at, values = _thinned(steps["step"] + 1, steps["loss"])
    panels[0].plot(at, values, color=LINE_COLOURS[0], linewidth=0.9, label="training")
    if LOSS in curves:
        panels[0].plot(
            *curves[LOSS],
            "o-",
            color=LINE_COLOURS[1],
            markersize=3,
            linewidth=1.0,
            label="validation",
        )
        panels[0].legend(frameon=False, fontsize=7.5)
    for colour, (name, curve) in zip(LINE_COLOURS[2:] * len(others), others.items(), strict=False):
        panels[1].plot(
            *curve, "o-", color=colour, markersize=3, linewidth=1.0, label=name.removeprefix(PREFIX)
        )
    if others:
        panels[1].legend(frameon=False, fontsize=7.5)
    name = run_facts(trace).schedule or "run"
    headline = (
        f"{name}, {counted(trace.world_size, 'rank')}:"
        f" {source_mark(trace.source, trace.attributes)}"
    )
    last = f"last training loss {float(steps['loss'][-1]):.4g}"
    set_title(figure, panels[0], headline, f"{counted(len(steps), 'step')}, {last}")
    return figure


def step_times_figure(trace: Trace) -> Figure:
    """Build the picture of the time of each step, warm-up steps among them."""
    steps = np.sort(trace.steps, order="step")
    unit = table_unit(trace)
    label = f"step time ({unit.name})"
    figure, (axes,) = new_figure(WIDTH_IN, 2.4, x=STEP_AXIS, y=[label], has_grid=True)
    at, times = _thinned(steps["step"] + 1, step_times_s(steps) / unit.size)
    axes.plot(at, times, color=LINE_COLOURS[0], linewidth=0.9)
    axes.set_ylim(bottom=0.0)
    return figure


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most MAX_POINTS points; each is the mean of equally many neighbouring steps."""
    size = -(-len(steps) // MAX_POINTS)
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.append(starts, len(steps)))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts

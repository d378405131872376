"""The section of one run: figures, pictures, tables and texts, and the data of its pictures."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass

import numpy as np
import yaml

from analysis.attribution.causes import attribute
from analysis.io.load import Loaded
from analysis.io.run_config import run_facts
from analysis.metrics.run_metrics import run_metrics, step_times_s
from analysis.plots.figure import DPI, SOURCE_MARKS
from analysis.plots.learning_curve import validation_curves
from analysis.plots.waterfall import waterfall_figure
from analysis.report.canvas_data import memory_block, timeline_block, windows_json
from analysis.report.html import Cell, Html, data_element, element, joined, line_chart, svg_image
from analysis.report.run_tables import (
    cause_table,
    key_figures,
    overview_row,
    prediction_table,
    rank_table,
    stage_table,
    table_unit,
)
from gems.errors import ConfigError
from gems.trace import TIME_UNIT, Trace
from gems.utils.units import counted

MAX_EVENTS = 1 << 20
CANVASES = (
    ("timeline", "Timeline: rank x time", "Timeline, rank by time"),
    ("memory", "Memory over time", "Memory of each rank over time"),
)
BUTTONS = (
    ("in", "+", "zoom in"),
    ("out", "\u2212", "zoom out"),
    ("left", "\u2190", "earlier"),
    ("right", "\u2192", "later"),
    ("previous", "previous step", ""),
    ("next", "next step", ""),
    ("all", "all steps", ""),
)
HELP = (
    "Wheel or + and \u2212: zoom. Drag or arrow keys: move. Shift and wheel, or Page Up and Page"
    " Down: other ranks. Hover: what it is."
)


@dataclass(frozen=True, slots=True)
class RunSection:
    """A run's part of the page, its figures for the table of all runs, and its number of events."""

    title: str
    source: str
    overview: dict[str, Cell]
    html: Html
    num_events: int


def run_section(place: int, name: str, loaded: Loaded, max_events: int) -> RunSection:
    """Build the section of the run at a position on the page.

    Its pictures contain at most `max_events` events.

    Raises:
        ConfigError: The trace's configuration is malformed.
    """
    trace = loaded.trace
    metrics = run_metrics(trace)
    causes = None
    with contextlib.suppress(ConfigError):  # the trace lacks data that the attribution needs
        causes = attribute(trace)
    facts = run_facts(trace)
    size = counted(trace.world_size, "rank")
    if facts.partitions and facts.replicas:
        size += (
            f" ({counted(facts.partitions, 'partition')} x {counted(facts.replicas, 'replica')})"
        )
    heading = f"{name}: {facts.schedule or 'run'} on {size}"
    events, left_out = select_events(trace, max_events)
    waterfall = []
    if causes is not None:
        picture = io.BytesIO()
        waterfall_figure(causes).savefig(picture, format="svg", dpi=DPI, facecolor="white")
        caption = element("figcaption", f"Where the time of a step was lost, {trace.source}")
        drawn = svg_image(picture.getvalue(), "Waterfall from ideal to actual step time")
        waterfall = [element("figure", caption, drawn)]
    tables = (
        None if causes is None else cause_table(f"causes-{place}", causes, trace),
        prediction_table(f"predictions-{place}", metrics, trace),
        stage_table(f"stages-{place}", trace),
        rank_table(f"ranks-{place}", metrics, trace, causes),
    )
    keys = [
        element(
            "div",
            element("dt", figure.name),
            element("dd", figure.value, class_="value"),
            *([element("dd", figure.detail)] if figure.detail else []),
            class_="key",
        )
        for figure in key_figures(metrics, trace)
    ]
    pictures, num_drawn = _pictures(place, trace, events)
    body = [
        element("h2", heading, " ", source_mark(trace.source)),
        *(element("p", note, class_="note") for note in (*loaded.notes, left_out) if note),
        element("dl", *keys, class_="keys"),
        pictures,
        *waterfall,
        element("div", *_charts(place, trace), class_="charts"),
        *(table.html() for table in tables if table is not None),
        *_texts(trace),
    ]
    html = element("section", *body, class_="run", id=f"run-{place}")
    return RunSection(heading, trace.source, overview_row(metrics, trace), html, num_drawn)


def select_events(trace: Trace, max_events: int = MAX_EVENTS) -> tuple[np.ndarray, str]:
    """Return the last whole steps within `max_events`, and a note.

    If a step alone is too large, return its first ranks. Events are sorted by (rank, start_ns). The
    note is empty if all events of the trace are returned.
    """
    events = trace.events
    if len(events) <= max_events:
        return events, ""
    steps, counts = np.unique(events["step"], return_counts=True)
    fitting = int((np.cumsum(counts[::-1]) <= max_events).sum())
    if fitting:
        first = int(steps[len(steps) - fitting])
        note = (
            f"shown: {counted(fitting, 'step')} from {first} on, of {counted(len(steps), 'step')}"
            " in the trace"
        )
        return events[events["step"] >= first], note
    last = events[events["step"] == steps[-1]]
    ranks, counts = np.unique(last["rank"], return_counts=True)
    fitting = max(int((np.cumsum(counts) <= max_events).sum()), 1)
    note = (
        f"shown: step {int(steps[-1])} of the first {counted(fitting, 'rank')}, of {len(ranks)} in"
        " the trace"
    )
    return last[last["rank"] <= ranks[fitting - 1]][:max_events], note


def source_mark(source: str) -> Html:
    """Return the mark for the source of figures."""
    return element("span", SOURCE_MARKS.get(source, source), class_=f"source {source}")


def _pictures(place: int, trace: Trace, events: np.ndarray) -> tuple[Html, int]:
    """Return the two canvases with their data, or only a note if the trace has no events."""
    if not len(events):
        return element("p", "The trace holds no events, so there is no timeline.", class_="note"), 0
    timeline = timeline_block(trace, events)
    memory = memory_block(trace, events, timeline["origin_ns"])
    windows = windows_json(trace, events, timeline["origin_ns"])
    is_in_units = TIME_UNIT in trace.attributes
    data = {
        "source": trace.source,
        "is_in_units": is_in_units,
        "timeline": timeline,
        "memory": memory,
        "windows": windows,
    }
    buttons = [
        element("button", shown, type="button", data_act=act, title=title or shown)
        for act, shown, title in BUTTONS
    ]
    drawn = [
        element(
            "figure",
            element("figcaption", caption, " ", source_mark(trace.source)),
            element(
                "canvas",
                "This picture needs JavaScript.",
                id=f"{kind}-{place}",
                class_=kind,
                tabindex="0",
                role="img",
                aria_label=f"{label}. {HELP}",
            ),
        )
        for kind, caption, label in CANVASES
        if kind != "memory" or memory is not None
    ]
    bar = element("div", *buttons, element("output", "", class_="range"), class_="bar")
    legend = element("ul", class_="legend")
    parts = (bar, *drawn[:1], legend, *drawn[1:], element("p", HELP, class_="help"))
    shown = element("div", *parts, class_="views", data_run=str(place))
    return joined([shown, data_element(f"data-{place}", data)]), timeline["count"]


def _charts(place: int, trace: Trace) -> list[Html]:
    steps = np.sort(trace.steps, order="step")
    if not len(steps):
        return []
    name = "optimizer step"
    loss = line_chart(
        f"loss-{place}", steps["step"], steps["loss"], name, f"Training loss, {trace.source}"
    )
    unit = table_unit(trace)
    times = step_times_s(steps) / unit.size
    about = f"Step time in {unit.name}, {trace.source}"
    step_times = line_chart(
        f"step-times-{place}", steps["step"], times, name, about, is_from_zero=True
    )
    validations = [
        line_chart(
            f"{metric}-{place}",
            *curve,
            name,
            f"{metric.replace('_', ' ').capitalize()}, {trace.source}",
        )
        for metric, curve in validation_curves(trace).items()
    ]
    return [loss, *validations, step_times]


def _texts(trace: Trace) -> list[Html]:
    """Return the texts of a trace; lists with an item per rank are cut to 64 items."""
    shortened = {
        key: (
            [*value[:64], f"... {len(value)} in all"]
            if isinstance(value, list) and len(value) > 64
            else value
        )
        for key, value in trace.attributes.items()
    }
    plan = trace.memory_plan
    with contextlib.suppress(ValueError):
        plan = json.dumps(json.loads(plan), indent=1)
    texts = {
        "Configuration": trace.run_yaml,
        "Versions, hosts and clocks": yaml.safe_dump(shortened, sort_keys=True, allow_unicode=True),
        f"Schedule, sha256 {trace.schedule_sha256}": "\n".join(
            f"rank {rank}: {row}" for rank, row in enumerate(trace.schedule_rows)
        ),
        "Memory plan": plan,
    }
    return [
        element("details", element("summary", title), element("pre", text))
        for title, text in texts.items()
        if text.strip()
    ]

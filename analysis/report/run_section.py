"""One run on the page: its figures, pictures, tables and texts, and the data that its pictures are drawn from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from analysis.io.load import Loaded
from analysis.io.run_facts import facts_of
from analysis.metrics.run_metrics import metrics_of, step_times_s
from analysis.plots.figure import SOURCE_MARKS
from analysis.report.chart import line_chart
from analysis.report.figures import key_figures, overview_row
from analysis.report.markup import Html, data_element, element, joined, svg_image
from analysis.report.memory_block import memory_block
from analysis.report.parts import Causes, causes_of
from analysis.report.run_tables import cause_table, prediction_table, rank_table, stage_table
from analysis.report.selection import select_events
from analysis.report.table import Cell
from analysis.report.timeline_block import timeline_block, windows_json
from gems.trace import Trace
from gems.utils.units import counted

CANVASES = (
    ("timeline", "Timeline: rank x time", "Timeline, rank by time"),
    ("memory", "Memory over time", "Memory of each rank over time"),
)
BUTTONS = (
    ("in", "+", "zoom in"), ("out", "\u2212", "zoom out"), ("left", "\u2190", "earlier"), ("right", "\u2192", "later"),
    ("previous", "previous step", ""), ("next", "next step", ""), ("all", "all steps", ""),
)  # fmt: skip
HELP = (
    "Wheel or + and \u2212: zoom. Drag or arrow keys: move. Shift and wheel, or Page Up and Page Down: other ranks. "
    "Hover: what it is."
)


@dataclass(frozen=True, slots=True)
class RunSection:
    """A run's part of the page, its figures for the table of all runs, and how many events it holds."""

    title: str
    source: str
    overview: dict[str, Cell]
    html: Html
    num_events: int


def run_section(place: int, name: str, loaded: Loaded, max_events: int) -> RunSection:
    """Build the section of the run at a place of the page; its pictures hold at most `max_events` events.

    Raises:
        ConfigError: the trace's configuration is malformed.
    """
    trace = loaded.trace
    metrics, causes = metrics_of(trace), causes_of(trace)
    heading = _heading(name, trace)
    selection = select_events(trace, max_events)
    tables = (
        None if causes is None else cause_table(f"causes-{place}", causes, trace.source),
        prediction_table(f"predictions-{place}", metrics, trace),
        stage_table(f"stages-{place}", trace),
        rank_table(f"ranks-{place}", metrics, trace, causes),
    )
    pictures, num_drawn = _pictures(place, trace, selection.events)
    body = [
        element("h2", heading, " ", source_mark(trace.source)),
        *(element("p", note, class_="note") for note in (*loaded.notes, selection.note) if note),
        element("dl", *(figure.html() for figure in key_figures(metrics, trace)), class_="keys"),
        pictures,
        _waterfall(causes, trace.source),
        element("div", *_charts(place, trace), class_="charts"),
        *(table.html() for table in tables if table is not None),
        *_texts(trace),
    ]
    html = element("section", *body, class_="run", id=f"run-{place}")
    return RunSection(heading, trace.source, overview_row(metrics), html, num_drawn)


def source_mark(source: str) -> Html:
    """Return the mark that says where figures come from."""
    return element("span", SOURCE_MARKS.get(source, source), class_=f"source {source}")


def _heading(name: str, trace: Trace) -> str:
    facts = facts_of(trace)
    size = counted(trace.world_size, "rank")
    if facts.partitions and facts.replicas:
        size += f" ({counted(facts.partitions, 'partition')} x {counted(facts.replicas, 'replica')})"
    return f"{name}: {facts.schedule or 'run'} on {size}"


def _pictures(place: int, trace: Trace, events: np.ndarray) -> tuple[Html, int]:
    """Return the two canvases with their data; of a trace without events nothing."""
    if not len(events):
        return element("p", "The trace holds no events, so there is no timeline.", class_="note"), 0
    timeline = timeline_block(trace, events)
    memory = memory_block(trace, events, timeline["origin_ns"])
    windows = windows_json(trace, events, timeline["origin_ns"])
    data = {"source": trace.source, "timeline": timeline, "memory": memory, "windows": windows}
    buttons = [
        element("button", shown, type="button", data_act=act, title=title or shown) for act, shown, title in BUTTONS
    ]
    drawn = [
        element(
            "figure",
            element("figcaption", caption, " ", source_mark(trace.source)),
            element(
                "canvas", "This picture needs JavaScript.", id=f"{kind}-{place}", class_=kind, tabindex="0", role="img",
                aria_label=f"{label}. {HELP}",
            ),
        )
        for kind, caption, label in CANVASES
        if kind != "memory" or memory is not None
    ]  # fmt: skip
    bar = element("div", *buttons, element("output", "", class_="range"), class_="bar")
    legend = element("ul", class_="legend")
    shown = element(
        "div",
        bar,
        *drawn[:1],
        legend,
        *drawn[1:],
        element("p", HELP, class_="help"),
        class_="views",
        data_run=str(place),
    )
    return joined([shown, data_element(f"data-{place}", data)]), timeline["count"]


def _charts(place: int, trace: Trace) -> list[Html]:
    steps = np.sort(trace.steps, order="step")
    if not len(steps):
        return []
    times_ms = step_times_s(steps) * 1e3
    loss = line_chart(
        f"loss-{place}",
        steps["step"],
        steps["loss"],
        "optimizer step",
        f"Training loss, {trace.source}",
        is_from_zero=False,
    )
    step_time = line_chart(
        f"step-times-{place}",
        steps["step"],
        times_ms,
        "optimizer step",
        f"Step time in ms, {trace.source}",
        is_from_zero=True,
    )
    return [chart for chart in (loss, step_time) if chart]


def _waterfall(causes: Causes | None, source: str) -> Html:
    if causes is None or causes.waterfall is None:
        return Html("")
    caption = element("figcaption", f"What a step's time was lost to, {source}")
    return element("figure", caption, svg_image(causes.waterfall, "Waterfall from ideal to actual step time"))


def _texts(trace: Trace) -> list[Html]:
    attributes = yaml.safe_dump(_shortened(trace.attributes), sort_keys=True, allow_unicode=True)
    rows = "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(trace.schedule_rows))
    texts = (
        ("Configuration", trace.run_yaml),
        ("Versions, hosts and clocks", attributes),
        (f"Schedule, sha256 {trace.schedule_sha256}", rows),
        ("Memory plan", _indented(trace.memory_plan)),
    )
    return [
        element("details", element("summary", title), element("pre", text)) for title, text in texts if text.strip()
    ]


def _shortened(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Leave the lists that have an item a rank at 64 of them."""
    return {
        key: [*value[:64], f"... {len(value)} in all"] if isinstance(value, list) and len(value) > 64 else value
        for key, value in attributes.items()
    }


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=1) if text else ""
    except ValueError:
        return text

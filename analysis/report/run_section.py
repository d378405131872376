"""The section of one run: figures, pictures, tables and texts, and the data of its pictures."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import numpy as np
import yaml

from analysis.attribution.causes import attribute
from analysis.io.load import Loaded
from analysis.io.run_config import run_facts
from analysis.metrics.run_metrics import run_metrics
from analysis.plots.figure import SOURCE_MARKS, as_svg
from analysis.plots.learning_curve import learning_figure, step_times_figure
from analysis.plots.waterfall import waterfall_figure
from analysis.report.canvas_data import memory_block, timeline_block, windows_json
from analysis.report.html import Cell, Html, data_element, element, filled, picture
from analysis.report.run_tables import (
    cause_table,
    key_figures,
    overview_row,
    prediction_table,
    rank_table,
    stage_table,
)
from gems.errors import ConfigError
from gems.trace import TIME_UNIT, Trace
from gems.utils.units import counted

MAX_EVENTS = 1 << 20


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
    ranks = facts.describe_ranks(trace.world_size)
    heading = f"{name}: {facts.schedule or 'run'} on {ranks}"
    events, left_out = select_events(trace, max_events)
    waterfall = []
    if causes is not None:
        caption = f"Where the time of a step was lost, {trace.source}"
        alt = "Waterfall from ideal to actual step time"
        waterfall = [picture(as_svg(waterfall_figure(causes)), alt, caption)]
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
        *_charts(trace),
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
    data = {
        "source": trace.source,
        "is_in_units": TIME_UNIT in trace.attributes,
        "timeline": timeline,
        "memory": memory,
        "windows": windows,
    }
    views = filled(
        "views.html",
        place=str(place),
        mark=source_mark(trace.source),
        memory="hidden" if memory is None else "",
        data=data_element(f"data-{place}", data),
    )
    return views, timeline["count"]


def _charts(trace: Trace) -> list[Html]:
    if not len(trace.steps):
        return []
    times = picture(
        as_svg(step_times_figure(trace)), "Time of each step", f"Step times, {trace.source}"
    )
    if not np.isfinite(trace.steps["loss"]).any():
        return [times]
    about = f"Training loss and validation, {trace.source}"
    return [picture(as_svg(learning_figure(trace)), "Loss and metrics over steps", about), times]


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

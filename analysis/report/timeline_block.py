"""The timeline's data: events by lane and track, in columns, and how each kind looks."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.metrics.step_window import step_window
from analysis.plots.timeline import LOOKS, shaded
from analysis.report.pack import packed
from gems.trace import KINDS, STREAMS, Trace

TRACKS = tuple(dict.fromkeys((look.top, look.bottom) for look in LOOKS))
NOT_DRAWN = 255
PLAIN = ("kind", "stage", "segment", "direction", "micro_batch", "step", "stream", "moved_bytes")


def looks_json() -> list[dict[str, Any]]:
    """Return the colours and tracks that the page draws with: those of the printed timeline."""
    return [
        {
            "legend": look.legend, "colour": look.colour, "text": look.text_colour, "shade": look.shade,
            "track": TRACKS.index((look.top, look.bottom)),
        }
        for look in LOOKS
    ]  # fmt: skip


def look_numbers(events: np.ndarray) -> np.ndarray:
    """Return each event's place in LOOKS by its kind and its shade (the direction after `shaded`); 255 for what has no look."""
    table = np.full((len(KINDS), 2), NOT_DRAWN, np.uint8)
    for number, look in enumerate(LOOKS):
        for kind in look.kinds:
            table[KINDS.index(kind), slice(None) if look.shade is None else look.shade] = number
    found: np.ndarray = table[events["kind"], np.clip(events["direction"], 0, 1)]
    return found


def timeline_block(trace: Trace, events: np.ndarray) -> dict[str, Any]:
    """Return the block: `columns` of the events, and `offsets[lane * tracks + track]` where each track's begin in them.

    Times are in ns from `origin_ns`. Within a track events are sorted by their begin. Events that have no look or no
    length are left out.
    """
    light_dark, words = shaded(events)
    looks = look_numbers(light_dark)
    is_drawn = (looks != NOT_DRAWN) & (events["end_ns"] > events["start_ns"])
    events, looks = events[is_drawn], looks[is_drawn]
    track_of = np.array([TRACKS.index((look.top, look.bottom)) for look in LOOKS])
    tracks = track_of[looks]
    ranks, lanes = np.unique(events["rank"], return_inverse=True)
    places = lanes * len(TRACKS) + tracks
    order = np.lexsort((events["start_ns"], places))
    events, looks, places = events[order], looks[order], places[order]
    origin_ns = int(events["start_ns"].min()) if len(events) else 0
    offsets = np.searchsorted(places, np.arange(len(ranks) * len(TRACKS) + 1))
    columns = {name: packed(events[name]) for name in PLAIN}
    columns |= {
        "start_ns": packed(events["start_ns"] - origin_ns, is_sum=True),
        "duration_ns": packed(events["end_ns"] - events["start_ns"]),
        "device_bytes": packed(events["device_bytes"], is_sum=True),
        "host_bytes": packed(events["host_bytes"], is_sum=True),
        "look": packed(looks),
    }
    return {
        "kinds": list(KINDS), "streams": list(STREAMS), "shades": list(words), "origin_ns": origin_ns,
        "ranks": ranks.tolist(), "offsets": packed(offsets), "columns": columns, "count": len(events),
    }  # fmt: skip


def windows_json(trace: Trace, events: np.ndarray, origin_ns: int) -> dict[str, Any]:
    """Return begin and end of the steps that are shown, in ns from `origin_ns`, and which of them is looked at first."""
    shown = np.unique(events["step"])
    steps = np.sort(trace.steps[np.isin(trace.steps["step"], shown)], order="step")
    first = step_window(trace).step
    return {
        "first": first if first in shown else int(shown[-1]),
        "step": steps["step"].tolist(),
        "start_ns": (steps["start_ns"] - origin_ns).tolist(),
        "end_ns": (steps["end_ns"] - origin_ns).tolist(),
    }

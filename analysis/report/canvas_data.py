"""The data that the page's canvases draw.

Events and bytes over time are packed in columns small enough for a million events.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from analysis.metrics.events import step_window
from analysis.plots.timeline import LOOKS, shaded
from gems.trace import KINDS, STREAMS, Trace

LEVEL = 3
# integer types of JavaScript's typed arrays, from narrow to wide
TYPES = ("i1", "u1", "i2", "u2", "i4", "u4")
SAMPLED = {
    "rss_bytes": "resident memory, sampled",
    "device_bytes": "device memory by the driver, sampled",
}
TRACKS = tuple(dict.fromkeys((look.top, look.bottom) for look in LOOKS))
NOT_DRAWN = 255
PLAIN = ("kind", "stage", "segment", "direction", "micro_batch", "step", "stream", "moved_bytes")


def looks_json() -> list[dict[str, Any]]:
    """Return the colours and tracks of the page, which are those of the printed timeline."""
    return [
        {
            "legend": look.legend,
            "colour": look.colour,
            "text": look.text_colour,
            "shade": look.shade,
            "track": TRACKS.index((look.top, look.bottom)),
        }
        for look in LOOKS
    ]


def look_numbers(events: np.ndarray) -> np.ndarray:
    """Return each event's index in LOOKS by its kind and shade, or 255 for none.

    The shade is the direction after `shaded`.
    """
    table = np.full((len(KINDS), 2), NOT_DRAWN, np.uint8)
    for number, look in enumerate(LOOKS):
        for kind in look.kinds:
            table[KINDS.index(kind), slice(None) if look.shade is None else look.shade] = number
    numbers: np.ndarray = table[events["kind"], np.clip(events["direction"], 0, 1)]
    return numbers


def timeline_block(trace: Trace, events: np.ndarray) -> dict[str, Any]:
    """Return the timeline: `columns` of the events, and `offsets` at which each track begins.

    The index in `offsets` is lane * tracks + track. Times are in ns from `origin_ns`. Within a
    track, events are sorted by their begin. Events without a look or a length are left out.
    """
    light_dark, shade_names = shaded(events)
    looks = look_numbers(light_dark)
    is_drawn = (looks != NOT_DRAWN) & (events["end_ns"] > events["start_ns"])
    events = events[is_drawn]
    looks = looks[is_drawn]
    ranks, lanes = np.unique(events["rank"], return_inverse=True)
    places = (
        lanes * len(TRACKS)
        + np.array([TRACKS.index((look.top, look.bottom)) for look in LOOKS])[looks]
    )
    order = np.lexsort((events["start_ns"], places))
    events = events[order]
    looks = looks[order]
    places = places[order]
    origin_ns = int(events["start_ns"].min()) if len(events) else 0
    offsets = np.searchsorted(places, np.arange(len(ranks) * len(TRACKS) + 1))
    columns = {name: packed(events[name]) for name in PLAIN}
    columns |= {name: packed(events[name], is_sum=True) for name in ("device_bytes", "host_bytes")}
    columns["start_ns"] = packed(events["start_ns"] - origin_ns, is_sum=True)
    columns |= {"duration_ns": packed(events["end_ns"] - events["start_ns"]), "look": packed(looks)}
    return {
        "kinds": list(KINDS),
        "streams": list(STREAMS),
        "shades": list(shade_names),
        "origin_ns": origin_ns,
        "ranks": ranks.tolist(),
        "offsets": packed(offsets),
        "columns": columns,
        "count": len(events),
    }


def windows_json(trace: Trace, events: np.ndarray, origin_ns: int) -> dict[str, Any]:
    """Return the begins and ends of the shown steps, and the first step to look at.

    Times are in ns from `origin_ns`.
    """
    shown = np.unique(events["step"])
    steps = np.sort(trace.steps[np.isin(trace.steps["step"], shown)], order="step")
    first = step_window(trace).step
    return {
        "first": first if first in shown else int(shown[-1]),
        "step": steps["step"].tolist(),
        "start_ns": (steps["start_ns"] - origin_ns).tolist(),
        "end_ns": (steps["end_ns"] - origin_ns).tolist(),
    }


def memory_block(trace: Trace, events: np.ndarray, origin_ns: int) -> dict[str, Any] | None:
    """Return the curves of bytes held on the device and in host memory, and the samples.

    Return None if there are no bytes. Each curve has `offsets[lane]`, where a rank's points begin
    in `time_ns` (from `origin_ns`) and `value_bytes`; a value is valid until the next point.
    """
    ranks = np.unique(events["rank"])
    curves = []
    for column, name in (
        ("device_bytes", "held on the device"),
        ("host_bytes", "held in host memory"),
    ):
        known = events[events[column] >= 0]
        if known[column].any():
            times_ns = known["end_ns"] - origin_ns
            curves.append(_curve(name, ranks, known, column, times_ns, is_ledger=True))
    samples = trace.samples[np.isin(trace.samples["rank"], ranks)]
    for column, name in SAMPLED.items():
        known = samples[samples[column] > 0]
        if len(known):
            times_ns = known["t_ns"] - origin_ns
            curves.append(_curve(name, ranks, known, column, times_ns, is_ledger=False))
    return {"ranks": ranks.tolist(), "curves": curves} if curves else None


def _curve(
    name: str,
    ranks: np.ndarray,
    points: np.ndarray,
    column: str,
    time_ns: np.ndarray,
    *,
    is_ledger: bool,
) -> dict[str, Any]:
    order = np.lexsort((time_ns, points["rank"]))
    points = points[order]
    is_new = np.ones(len(points), bool)
    is_new[1:] = (np.diff(points[column]) != 0) | (np.diff(points["rank"]) != 0)
    points = points[is_new]
    return {
        "name": name,
        "is_ledger": is_ledger,
        "peak_bytes": int(points[column].max()),
        "offsets": packed(np.searchsorted(points["rank"], [*ranks, ranks[-1] + 1])),
        "time_ns": packed(time_ns[order][is_new], is_sum=True),
        "value_bytes": packed(points[column], is_sum=True),
    }


def packed(values: np.ndarray, *, is_sum: bool = False) -> dict[str, Any]:
    """Return a column as `{type, count, is_sum, data}`, in the narrowest type that fits.

    `data` is base64 of the deflated bytes: the first bytes of all values, then the second ones and
    so on, because adjacent similar bytes compress well. With `is_sum`, differences are stored,
    starting from 0, which are small if values grow.

    Raises:
        ValueError: Whole numbers are not exact in a double.
    """
    stored = np.diff(values, prepend=values.dtype.type(0)) if is_sum else values
    kind = "f8"
    if stored.dtype.kind in "iub":
        low, high = (int(stored.min()), int(stored.max())) if len(stored) else (0, 0)
        kind = next(
            (kind for kind in TYPES if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max),
            "f8",
        )
    if (
        kind == "f8"
        and stored.dtype.kind in "iu"
        and len(stored)
        and int(np.abs(values).max()) > 1 << 53
    ):
        raise ValueError("whole numbers beyond 2^53 are not exact in JavaScript")
    little = np.ascontiguousarray(stored.astype(f"<{kind}"))
    planes = little.view(np.uint8).reshape(len(little), little.itemsize).T
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), LEVEL)).decode()
    return {"type": kind, "count": len(little), "is_sum": is_sum, "data": data}

"""The timeline picture, from a trace: rank x time of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.io.run_config import RunFacts, run_facts
from analysis.metrics.events import StepWindow, of_kinds, ranks_written, step_window
from analysis.metrics.run_metrics import backward_mean_s, stage_mean_s
from analysis.plots.figure import (
    DPI,
    TEXT_COLOUR,
    WIDTH_IN,
    add_legend,
    new_figure,
    scaled_pt,
    set_title,
    show_units,
    source_mark,
)
from gems.trace import TIME_UNIT, Trace
from gems.utils.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LANES = 64
MAX_BOXES = 40_000  # more boxes are drawn by columns of pixels
IDLE_COLOUR = "#f0f0f0"
MS = 1e-6
STAGE_NAMES: dict[int, tuple[str, ...]] = {1: (), 2: ("1st stage of a rank", "2nd stage")}
MIN_LABEL_PT = 4.5
MAX_LABEL_PT = 8.0


@dataclass(frozen=True, slots=True)
class Look:
    """The style of boxes; `top` and `bottom` are their span of the lane, positive below its middle.

    `shade` is 0 for light and 1 for dark, see `shaded`, or None if there is only one.
    """

    kinds: tuple[str, ...]
    shade: int | None
    legend: str
    colour: str
    text_colour: str = "black"
    top: float = -0.40
    bottom: float = 0.28


LOOKS = (
    Look(("F",), 0, "F", "#8ec3e6"),
    Look(("F",), 1, "F", "#1b5f9e", "white"),
    Look(("B",), 0, "B", "#fdbf6f"),
    Look(("B",), 1, "B", "#c94f07", "white"),
    Look(("I",), 0, "I, input gradient", "#f6a58a"),
    Look(("I",), 1, "I, input gradient", "#a32c1e", "white"),
    Look(("W",), 0, "W, weight gradient", "#a9d8a0"),
    Look(("W",), 1, "W, weight gradient", "#2f7d32", "white"),
    Look(("R",), 0, "R, recomputation", "#cdb9dd"),
    Look(("R",), 1, "R, recomputation", "#6b3f8f", "white"),
    Look(("REDUCE_GRAD",), None, "gradient reduction, with waiting", "#9a9a9a"),
    Look(("STEP",), None, "optimizer step", "#4d4d4d"),
    Look(("INPUT",), None, "waiting for input", "#e377a2"),
    Look(("SEND_F", "SEND_B"), None, "send", "#5e3c99", top=0.31, bottom=0.38),
    Look(
        ("START_REDUCE",),
        None,
        "gradient reduction beside compute",
        "#7f7f7f",
        top=0.31,
        bottom=0.38,
    ),
    Look(
        ("RECV_F", "RECV_B"), None, "receive, from its posting on", "#cbbfe0", top=0.39, bottom=0.44
    ),
    Look(("OFFLOAD",), None, "copy to host memory", "#b8860b", top=0.45, bottom=0.49),
    Look(("PREFETCH",), None, "copy back", "#117a8b", top=0.50, bottom=0.54),
)


def timeline_figure(trace: Trace, step: int | None = None) -> Figure:
    """Build the picture of one step, by default the last whole step that is not a warm-up step.

    Each world rank has a lane, up to 64 of them. F is blue, B orange, I red, W green and R purple,
    light and dark for the two directions or for the stages of a rank, with the micro-batch in the
    box if it fits. Idle time is the grey of the lane. Transfers are thin bars below the lane, from
    posting to completion, and copies to and from host memory are below these. Time is in ms from
    the first rank's begin.

    Raises:
        ConfigError: There is no such step, or the trace has no events.
    """
    window = step_window(trace, step)
    facts = run_facts(trace)
    ranks = np.unique(window.events["rank"])[:MAX_LANES]
    figure, axes = lanes_figure(trace, window, ranks, _title(trace, window, facts, len(ranks)))
    if facts.partitions and facts.replicas and facts.replicas > 1:
        for lane in range(1, len(ranks)):
            if ranks[lane] // facts.partitions != ranks[lane - 1] // facts.partitions:
                axes.axhline(lane - 0.48, color=TEXT_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)))
    return figure


def lanes_figure(
    trace: Trace, window: StepWindow, ranks: np.ndarray, title: tuple[str, str]
) -> tuple[Figure, Axes]:
    """Build the picture of one step.

    It has a lane for each of `ranks`, boxes, micro-batches, a legend, and two lines of title.
    """
    events, shade_names = shaded(window.events[np.isin(window.events["rank"], ranks)])
    forwards = events[of_kinds(events, "F")]
    typical_s = (
        float(np.median(forwards["end_ns"] - forwards["start_ns"])) * 1e-9 if len(forwards) else 0.0
    )
    # wide enough to see a forward
    width_in = 0.115 * window.span_s / typical_s if typical_s else WIDTH_IN
    lane_in = 0.50 if len(ranks) <= 8 else 0.36 if len(ranks) <= 16 else 0.20
    height_in = 1.55 + lane_in * max(len(ranks), 2)
    figure, (axes,) = new_figure(min(max(width_in, WIDTH_IN), 12.0), height_in, y=["rank"])
    rows = trace.rank_steps[trace.rank_steps["step"] == window.step]
    own = {int(row["rank"]): (int(row["start_ns"]), int(row["end_ns"])) for row in rows}
    # each rank's own step; what is not covered later is a bubble
    for lane, rank in enumerate(ranks):
        start, end = own.get(int(rank), (window.start_ns, window.end_ns))
        span = ((start - window.start_ns) * MS, (end - start) * MS)
        axes.broken_barh([span], (lane - 0.40, 0.68), facecolors=IDLE_COLOUR, linewidth=0)
    drawn = _draw_boxes(figure, axes, window, events, ranks)
    axes.set_xlim(0.0, max(window.span_s * 1e3, 1e-9))
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    shown = range(0, len(ranks), 1 if len(ranks) <= 32 else 4)
    axes.set_yticks(list(shown), [str(ranks[lane]) for lane in shown])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    show_units(axes, trace.attributes)
    set_title(figure, axes, *title)
    _name_looks(figure, drawn, shade_names)
    # determine the layout, so that the size of a box in points is known
    figure.draw_without_rendering()
    _label_boxes(figure, axes, window, events, ranks)
    return figure, axes


def shaded(events: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the events with their shade in place of the direction, and a name for each shade.

    The shade (0 light, 1 dark) is the direction if there are two; with one direction, the stages of
    a rank alternate.
    """
    if (events["direction"] > 0).any():
        return events, ("direction 0 (down)", "direction 1 (up)")
    events = events.copy()
    num_stages = int(events["stage"].max(initial=0)) + 1
    place = events["rank"].astype(np.int64) * num_stages
    forwards = np.unique((place + events["stage"])[of_kinds(events, "F")])
    # number of stages on all lower ranks
    before = np.searchsorted(forwards, place)
    events["direction"] = (np.searchsorted(forwards, place + events["stage"]) - before) % 2
    of_rank = forwards // num_stages
    most = int(np.unique(of_rank, return_counts=True)[1].max(initial=1))
    return events, STAGE_NAMES.get(most, ("1st, 3rd ... stage of a rank", "2nd, 4th ... stage"))


def _draw_boxes(
    figure: Figure, axes: Axes, window: StepWindow, events: np.ndarray, ranks: np.ndarray
) -> list[Look]:
    """Draw all events, too many as columns of pixels, and return the looks that were used."""
    if len(events) > MAX_BOXES:
        return _draw_dense(figure, axes, window, events, ranks)
    pt_per_ms = figure.get_figwidth() * 72 / max(window.span_s * 1e3, 1e-9)
    drawn = {}
    for look in LOOKS:
        for lane, rank in enumerate(ranks):
            boxes = events[look_mask(events, look) & (events["rank"] == rank)]
            if not len(boxes):
                continue
            start_ms = (boxes["start_ns"] - window.start_ns) * MS
            width_ms = (boxes["end_ns"] - boxes["start_ns"]) * MS
            typical_pt = float(np.median(width_ms)) * pt_per_ms
            # an edge must not cover the box
            edge_pt = 0.6 if typical_pt > 4 else 0.25 if typical_pt > 1.5 else 0.0
            axes.broken_barh(
                np.stack([start_ms, width_ms], axis=1).tolist(),
                (lane + look.top, look.bottom - look.top),
                facecolors=look.colour,
                edgecolors="white",
                linewidth=edge_pt if look.top < 0 else 0,
            )
            drawn[look] = True
    return list(drawn)


def _draw_dense(
    figure: Figure, axes: Axes, window: StepWindow, events: np.ndarray, ranks: np.ndarray
) -> list[Look]:
    """Draw each lane of each track as an image.

    The colour of a column is the mean of the actions in it.
    """
    from matplotlib.colors import to_rgb

    num_columns = round(figure.get_figwidth() * DPI)
    per_ns = num_columns / max(window.end_ns - window.start_ns, 1)
    start, end = ((events[name] - window.start_ns) * per_ns for name in ("start_ns", "end_ns"))
    lane = np.searchsorted(ranks, events["rank"])
    shares: dict[Look, np.ndarray] = {}
    for look in LOOKS:
        is_mine = look_mask(events, look)
        if is_mine.any():
            shares[look] = coverage(
                start[is_mine], end[is_mine], lane[is_mine], len(ranks), num_columns
            )
    for top, bottom in dict.fromkeys((look.top, look.bottom) for look in shares):
        row_shares = {look: share for look, share in shares.items() if look.top == top}
        colours = np.array([to_rgb(look.colour) for look in row_shares])
        for place, pixels in enumerate(blended(np.stack(list(row_shares.values())), colours)):
            axes.imshow(
                pixels[None],
                extent=(0.0, window.span_s * 1e3, place + bottom, place + top),
                aspect="auto",
                interpolation="nearest",
                zorder=1.5,
            )
    return list(shares)


def look_mask(events: np.ndarray, look: Look) -> np.ndarray:
    """Return the mask of the shaded events that are drawn with a look."""
    is_mine = of_kinds(events, *look.kinds) & (events["end_ns"] > events["start_ns"])
    return is_mine if look.shade is None else is_mine & (events["direction"] == look.shade)


def _title(trace: Trace, window: StepWindow, facts: RunFacts, num_lanes: int) -> tuple[str, str]:
    size = counted(trace.world_size, "rank")
    if facts.partitions and facts.replicas and facts.replicas > 1:
        size += f", {facts.partitions} partitions x {facts.replicas} replicas"
    if num_lanes < trace.world_size:
        alike = ", the others are alike" if num_lanes == ranks_written(trace) else ""
        size += f" ({num_lanes} shown{alike})"
    source = source_mark(trace.source, trace.attributes)
    details = [window.label]
    if window.is_whole:
        is_in_units = TIME_UNIT in trace.attributes
        details[0] += (
            f": {window.span_s:.4g} units" if is_in_units else f": {window.span_s * 1e3:.4g} ms"
        )
    if window.bubble is not None:
        details.append(f"bubble {100 * window.bubble:.1f} %")
    times_s = [
        stage_mean_s(window.events, "F"),
        backward_mean_s(window.events),
        stage_mean_s(window.events, "W"),
    ]
    formula = facts.bubble(*times_s)
    if formula is not None and window.is_whole:
        details.append(f"closed form {100 * formula:.1f} %")
    return f"{facts.schedule or 'unnamed schedule'}, {size}: {source}", ", ".join(details)


def _name_looks(figure: Figure, drawn: list[Look], shade_names: tuple[str, ...]) -> None:
    from matplotlib.patches import Patch

    patches = []
    for look in drawn:
        text = (
            look.legend
            if look.shade is None or not shade_names
            else f"{look.legend}, {shade_names[look.shade]}"
        )
        patches.append(Patch(facecolor=look.colour, label=text))
    patches.append(
        Patch(facecolor=IDLE_COLOUR, edgecolor="#bbbbbb", linewidth=0.5, label="idle (bubble)")
    )
    columns = (
        len(patches) if len(patches) <= 6 else (len(patches) + 1) // 2 if len(patches) <= 8 else 4
    )
    add_legend(figure, patches, columns=columns, columnspacing=1.4, handlelength=1.4)


def _label_boxes(
    figure: Figure, axes: Axes, window: StepWindow, events: np.ndarray, ranks: np.ndarray
) -> None:
    """Write micro-batch numbers, all of a kind in one size, if that size fits the typical box."""
    corner_px, far_px = axes.transData.transform([(0.0, 0.0), (1.0, 1.0)])
    pt_per_ms, pt_per_lane = abs(far_px - corner_px) * 72 / figure.dpi
    lane_of = {int(rank): lane for lane, rank in enumerate(ranks)}
    for look in LOOKS:
        of_kind = events[of_kinds(events, *look.kinds) & (events["micro_batch"] >= 0)]
        if look.shade is None or not len(of_kind):
            continue
        digits = len(str(int(of_kind["micro_batch"].max())))
        room_pt = float(np.median(of_kind["end_ns"] - of_kind["start_ns"])) * MS * pt_per_ms
        size_pt = min(
            scaled_pt(figure, MAX_LABEL_PT),
            0.8 * 0.68 * pt_per_lane,
            (room_pt - 1.5) / (0.62 * digits),
        )
        if size_pt < MIN_LABEL_PT:
            continue
        for event in of_kind[of_kind["direction"] == look.shade]:
            width_ms = (event["end_ns"] - event["start_ns"]) * MS
            text = str(int(event["micro_batch"]))
            if width_ms * pt_per_ms < 0.62 * size_pt * len(text):
                continue
            middle_ms = (event["start_ns"] - window.start_ns) * MS + width_ms / 2
            axes.text(
                middle_ms,
                lane_of[int(event["rank"])] - 0.06,
                text,
                fontsize=size_pt,
                color=look.text_colour,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def coverage(
    start: np.ndarray, end: np.ndarray, row: np.ndarray, num_rows: int, num_columns: int
) -> np.ndarray:
    """Return how much of each column the boxes of each row cover, `[row, column]`.

    1 means that a column is completely covered once. Begins and ends of the boxes are in columns;
    anything outside 0 to `num_columns` is cut off.
    """
    # a box may end at the last edge, and the columns after it begin with the next one
    width = num_columns + 2

    def covered_from(edge: np.ndarray) -> np.ndarray:
        """Return how much the boxes would cover without an end."""
        edge = np.clip(edge, 0, num_columns)
        column = edge.astype(np.int64)
        place = row.astype(np.int64) * width + column
        part = np.bincount(place, column + 1 - edge, minlength=num_rows * width).reshape(
            num_rows, width
        )
        whole = np.bincount(place + 1, minlength=num_rows * width).reshape(num_rows, width)
        begun: np.ndarray = part + np.cumsum(whole, axis=1)
        return begun[:, :num_columns]

    covered: np.ndarray = covered_from(start) - covered_from(end)
    return covered


def blended(shares: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return the colour and opacity of each pixel, `[..., 4]`.

    The colour is the mean over the kinds that cover the pixel; the opacity is the coverage.
    `shares[kind, ...]` is the coverage by a kind, `colours[kind]` its red, green and blue from 0
    to 1.
    """
    total = shares.sum(axis=0)
    mean = np.einsum("k...,kc->...c", shares, colours) / np.maximum(total, 1e-12)[..., None]
    mixed: np.ndarray = np.clip(
        np.concatenate([mean, np.minimum(total, 1.0)[..., None]], axis=-1), 0.0, 1.0
    )
    return mixed

"""A line chart as SVG in the page, in the colours of the page."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from analysis.report.markup import Html, element, joined

WIDTH_PX, HEIGHT_PX = 560, 190
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 64, 10, 14, 34
MAX_POINTS, MAX_DOTS = 1000, 40


def line_chart(name: str, x: np.ndarray, y: np.ndarray, x_label: str, y_label: str, *, is_from_zero: bool) -> Html:
    """Return a chart of finite values over x; of more than 1000 points, least and most of neighbours are drawn.

    With `is_from_zero` the axis of y begins at 0.
    """
    finite = np.isfinite(y)
    x, y = x[finite].astype(float), y[finite].astype(float)
    if not len(x):
        return Html("")
    low = 0.0 if is_from_zero else float(y.min())
    high = float(y.max()) if float(y.max()) > low else low + (abs(low) or 1.0)
    x, y = _thinned(x, y)
    span = float(x[-1] - x[0]) or 1.0
    across = LEFT_PX + (x - x[0]) / span * (WIDTH_PX - LEFT_PX - RIGHT_PX)
    down = HEIGHT_PX - BOTTOM_PX - (y - low) / (high - low) * (HEIGHT_PX - TOP_PX - BOTTOM_PX)
    points = " ".join(f"{px:.1f},{py:.1f}" for px, py in zip(across, down, strict=True))
    bottom_px = HEIGHT_PX - BOTTOM_PX
    ticks = [_tick(low, bottom_px), _tick(high, TOP_PX), _tick((low + high) / 2, (TOP_PX + bottom_px) / 2)]
    ends = [
        element("text", f"{x[place]:g}", x=f"{across[place]:.0f}", y=str(HEIGHT_PX - 20), text_anchor=anchor)
        for place, anchor in ((0, "start"), (-1, "end"))
    ]
    middle_px = (LEFT_PX + WIDTH_PX) // 2
    label = element("text", x_label, x=str(middle_px), y=str(HEIGHT_PX - 5), text_anchor="middle")
    line = element("polyline", points=points)
    circled = zip(across, down, strict=True) if len(x) <= MAX_DOTS else ()
    dots = [element("circle", cx=f"{px:.1f}", cy=f"{py:.1f}", r="2.5") for px, py in circled]
    drawing = element(
        "svg", *ticks, *ends, label, line, *dots,
        viewBox=f"0 0 {WIDTH_PX} {HEIGHT_PX}", role="img", aria_label=f"{y_label} over {x_label}", class_="chart",
    )  # fmt: skip
    return element("figure", element("figcaption", y_label), drawing, id=name)


def _tick(value: float, at_px: float) -> Html:
    line = element("line", x1=str(LEFT_PX), x2=str(WIDTH_PX - RIGHT_PX), y1=f"{at_px:.1f}", y2=f"{at_px:.1f}")
    return joined([line, element("text", f"{value:.4g}", x=str(LEFT_PX - 6), y=f"{at_px + 4:.1f}", text_anchor="end")])


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(x) <= MAX_POINTS:
        return x, y
    edges = np.linspace(0, len(x), MAX_POINTS // 2 + 1).astype(int)
    kept = set()
    for first, end in pairwise(edges.tolist()):
        kept |= {first + int(np.argmin(y[first:end])), first + int(np.argmax(y[first:end]))}
    places = np.array(sorted(kept | {0, len(x) - 1}))
    return x[places], y[places]

"""Elements, tables and charts of the page; every text in them is escaped."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gems.utils.units import UNKNOWN

Cell = str | float | int | None
VOID = ("meta", "input", "img", "br")
LONG_CHARS = 40  # longer texts in a table are broken into lines
# sizes of a chart
WIDTH_PX = 560
HEIGHT_PX = 190
LEFT_PX = 64
RIGHT_PX = 10
TOP_PX = 14
BOTTOM_PX = 34
MAX_POINTS = 1000
MAX_DOTS = 40


class Html(str):
    """A text that is already HTML.

    Only functions of this module and the readers of our own files create it.
    """

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: object) -> Html:
    """Return an element; attributes, and children that are not `Html`, are escaped.

    An underscore in an attribute's name becomes a dash, and one at its end is dropped (`class_`);
    True sets the name alone.
    """
    named = [
        (key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not False
    ]
    parts = [key if value is True else f'{key}="{html.escape(str(value))}"' for key, value in named]
    opened = f"<{' '.join([tag, *parts])}>"
    return Html(opened if tag in VOID else f"{opened}{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """Return the concatenated children, with texts escaped."""
    return Html(
        "".join(child if isinstance(child, Html) else html.escape(child) for child in children)
    )


def data_element(name: str, document: Any) -> Html:
    """Return a script element that contains data as JSON; no text inside can end the element."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def svg_image(svg: bytes, alt: str) -> Html:
    """Return an image that is embedded in the page."""
    coded = base64.b64encode(svg).decode()
    return element("img", alt=alt, src=f"data:image/svg+xml;base64,{coded}")


@dataclass(frozen=True, slots=True)
class Table:
    """A table: an id on the page, a heading, names of columns with units, and rows.

    None is an unknown figure. `digits` are the decimals of each column's numbers; whole numbers are
    shown without decimals.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    digits: tuple[int, ...] = ()

    def html(self) -> Html:
        """Return the table, which is sorted by a click on a column's name.

        The cells contain their sort keys.
        """
        head = []
        for place, name in enumerate(self.columns):
            kind = "words" if any(isinstance(row[place], str) for row in self.rows) else "number"
            head.append(
                element("th", element("button", name, type="button"), scope="col", class_=kind)
            )
        digits = self.digits or (3,) * len(self.columns)
        body = [element("tr", *map(_cell, row, digits)) for row in self.rows]
        table = element(
            "table",
            element("thead", element("tr", *head)),
            element("tbody", *body),
            class_="sorts",
            id=self.name,
        )
        return element(
            "figure", element("figcaption", self.title), element("div", table, class_="wide")
        )


def _cell(cell: Cell, digits: int) -> Html:
    if cell is None:
        return element("td", UNKNOWN, class_="number")
    if isinstance(cell, str):
        return element("td", cell, class_="long" if len(cell) > LONG_CHARS else "words")
    shown = f"{cell:d}" if isinstance(cell, int) else f"{cell:.{digits}f}"
    return element("td", shown, class_="number", data_value=repr(cell))


def line_chart(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    x_label: str,
    y_label: str,
    *,
    is_from_zero: bool = False,
) -> Html:
    """Return a chart of finite values over x.

    Of more than 1000 points, the smallest and largest of neighbours are drawn. With `is_from_zero`
    the y axis begins at 0.
    """
    finite = np.isfinite(y)
    x = x[finite].astype(float)
    y = y[finite].astype(float)
    if not len(x):
        return Html("")
    low = 0.0 if is_from_zero else float(y.min())
    high = float(y.max()) if float(y.max()) > low else low + (abs(low) or 1.0)
    x, y = _thinned(x, y)
    span = float(x[-1] - x[0]) or 1.0
    across = LEFT_PX + (x - x[0]) / span * (WIDTH_PX - LEFT_PX - RIGHT_PX)
    down = HEIGHT_PX - BOTTOM_PX - (y - low) / (high - low) * (HEIGHT_PX - TOP_PX - BOTTOM_PX)
    points = [(f"{px:.1f}", f"{py:.1f}") for px, py in zip(across, down, strict=True)]
    parts = []
    for share in (0.0, 1.0, 0.5):
        at_px = HEIGHT_PX - BOTTOM_PX - share * (HEIGHT_PX - TOP_PX - BOTTOM_PX)
        parts.append(
            element(
                "line", x1=LEFT_PX, x2=WIDTH_PX - RIGHT_PX, y1=f"{at_px:.1f}", y2=f"{at_px:.1f}"
            )
        )
        value = f"{low + share * (high - low):.4g}"
        parts.append(element("text", value, x=LEFT_PX - 6, y=f"{at_px + 4:.1f}", text_anchor="end"))
    for place, anchor in ((0, "start"), (-1, "end")):
        parts.append(
            element(
                "text",
                f"{x[place]:g}",
                x=f"{across[place]:.0f}",
                y=HEIGHT_PX - 20,
                text_anchor=anchor,
            )
        )
    middle_px = (LEFT_PX + WIDTH_PX) // 2
    parts.append(element("text", x_label, x=middle_px, y=HEIGHT_PX - 5, text_anchor="middle"))
    parts.append(element("polyline", points=" ".join(map(",".join, points))))
    if len(points) <= MAX_DOTS:
        parts += [element("circle", cx=px, cy=py, r="2.5") for px, py in points]
    drawing = element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH_PX} {HEIGHT_PX}",
        role="img",
        aria_label=f"{y_label} over {x_label}",
        class_="chart",
    )
    return element("figure", element("figcaption", y_label), drawing, id=name)


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(x) <= MAX_POINTS:
        return x, y
    edges = np.linspace(0, len(x), MAX_POINTS // 2 + 1).astype(int)
    kept = set()
    for first, end in pairwise(edges.tolist()):
        kept |= {first + int(np.argmin(y[first:end])), first + int(np.argmax(y[first:end]))}
    places = np.array(sorted(kept | {0, len(x) - 1}))
    return x[places], y[places]

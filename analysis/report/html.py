"""Elements, tables and pictures of the page; every text in them is escaped."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from gems.utils.units import UNKNOWN

Cell = str | float | int | None
LONG_CHARS = 40  # longer texts in a table are broken into lines


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
    return Html(opened if tag == "img" else f"{opened}{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """Return the concatenated children, with texts escaped."""
    return Html(
        "".join(child if isinstance(child, Html) else html.escape(child) for child in children)
    )


def own_file(name: str) -> Html:
    """Read a file of this package that is part of the page unchanged."""
    return Html(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def filled(name: str, **parts: str) -> Html:
    """Fill a template of this package; parts that are not `Html` are escaped."""
    return Html(Template(own_file(name)).substitute({k: joined([v]) for k, v in parts.items()}))


def data_element(name: str, document: Any) -> Html:
    """Return a script element that contains data as JSON; no text inside can end the element."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def picture(svg: bytes, alt: str, *caption: str) -> Html:
    """Return a picture that is embedded in the page, with a caption if given."""
    coded = base64.b64encode(svg).decode()
    image = element("img", alt=alt, src=f"data:image/svg+xml;base64,{coded}")
    return element("figure", *(element("figcaption", text) for text in caption), image)


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

"""Tables of the page: columns with units, numbers that sort as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.report.markup import Html, element, joined
from gems.utils.units import UNKNOWN

Cell = str | float | int | None
LONG_CHARS = 40  # a longer text is broken into lines


@dataclass(frozen=True, slots=True)
class Table:
    """A table: an id of the page, a heading, names of columns with units, and rows; None is a figure that is not known.

    Attributes:
        digits: decimals of each column's numbers; whole numbers are shown whole.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    digits: tuple[int, ...] = ()

    def html(self) -> Html:
        """Return the table, sorted by a click on a column's name; the cells carry what they are sorted by."""
        head = element(
            "tr",
            *(
                element("th", element("button", name, type="button"), scope="col", class_=kind)
                for name, kind in zip(self.columns, self._kinds(), strict=True)
            ),
        )
        digits = self.digits or (3,) * len(self.columns)
        body = joined(
            element("tr", *(_cell(cell, places) for cell, places in zip(row, digits, strict=True))) for row in self.rows
        )
        table = element("table", element("thead", head), element("tbody", body), class_="sorts", id=self.name)
        return element("figure", element("figcaption", self.title), element("div", table, class_="wide"))

    def _kinds(self) -> list[str]:
        """Return the kind of each column, words or number."""
        return [
            "words" if any(isinstance(row[place], str) for row in self.rows) else "number"
            for place in range(len(self.columns))
        ]


def _cell(cell: Cell, digits: int) -> Html:
    if cell is None:
        return element("td", UNKNOWN, class_="number")
    if isinstance(cell, str):
        return element("td", cell, class_="long" if len(cell) > LONG_CHARS else "words")
    shown = f"{cell:d}" if isinstance(cell, int) else f"{cell:.{digits}f}"
    return element("td", shown, class_="number", data_value=repr(cell))

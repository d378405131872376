"""Tables for terminals: the only renderer of all verbs."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from gems.utils.units import UNKNOWN

Cell = str | float | int | None
GAP = "  "
MIN_LAST_CHARS = 30  # minimum width of the last column on a narrow terminal
RIGHT = ">"  # format of texts that are right-aligned, like numbers


def table(
    columns: Mapping[str, str],
    rows: Iterable[Sequence[Cell]],
    *,
    title: str = "",
    indent: int = 0,
    width: int = 0,
) -> str:
    """Return rows of cells as aligned lines under their column heads.

    Args:
        columns: The head of each column, with the unit in brackets, and the format of its numbers
            (`.1f`, `d`), which are right-aligned. A column without a format contains left-aligned
            texts; RIGHT aligns them right.
        rows: One cell per column. None is shown as `-`. A text in a column of numbers is shown
            unchanged.
        title: A line above the heads.
        indent: Spaces before each line except the title.
        width: The width of the terminal in characters, to which the last column is cut; 0 for no
            limit.
    """
    formats = tuple(columns.values())
    lines = [tuple(columns)]
    lines += [
        tuple(_text(cell, spec) for cell, spec in zip(row, formats, strict=True)) for row in rows
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    limit = (
        max(MIN_LAST_CHARS, width - indent - sum(widths[:-1]) - len(GAP) * (len(widths) - 1))
        if width
        else widths[-1]
    )
    widths[-1] = min(widths[-1], limit)
    shown = [" " * indent + _line(line, widths, formats) for line in lines]
    return "\n".join([title] * bool(title) + [line.rstrip() for line in shown])


def name_values(pairs: Iterable[tuple[str, object]], *, title: str = "", indent: int = 2) -> str:
    """Return a line for each name and its value, with the values aligned."""
    listed = [(name, printable(str(value))) for name, value in pairs]
    width = max((len(name) for name, _ in listed), default=0)
    lines = [f"{'':<{indent}}{name:<{width}}{GAP}{value}".rstrip() for name, value in listed]
    return "\n".join([title] * bool(title) + lines)


def terminal_width() -> int:
    """Return the number of columns of COLUMNS or of the terminal of stdout.

    Return 0 for a file or a pipe, which have no limit.
    """
    if (text := os.environ.get("COLUMNS", "")).isdecimal():
        return int(text)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def wrapped(text: str, first: str, width: int, hanging: int = 0) -> str:
    """Return a text after `first`, wrapped to lines of `width` characters; 0 means one line.

    Further lines are indented to the end of `first`, and by `hanging` more.
    """
    indent = " " * (len(first) + hanging)
    return textwrap.fill(
        text,
        max(width, len(first) + MIN_LAST_CHARS) if width else len(first + text) + 1,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def printable(text: str) -> str:
    """Return text on one line, without characters that control a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _text(cell: Cell, spec: str) -> str:
    if cell is None:
        return UNKNOWN
    return printable(cell) if isinstance(cell, str) else format(cell, "" if spec == RIGHT else spec)


def _line(cells: Sequence[str], widths: Sequence[int], formats: Sequence[str]) -> str:
    aligned = [
        cell.rjust(width) if spec else cell.ljust(width)
        for cell, width, spec in zip(cells, widths, formats, strict=True)
    ]
    if len(cells[-1]) > widths[-1]:
        aligned[-1] = cells[-1][: max(0, widths[-1] - 3)] + "..."
    return GAP.join(aligned)

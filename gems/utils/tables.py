"""Tables for people on a terminal: the one renderer of every verb."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from gems.utils.units import UNKNOWN

Cell = str | float | int | None
GAP = "  "
MIN_LAST_CHARS = 30  # that the last column keeps on a narrow terminal
RIGHT = ">"  # the format of texts that are right-aligned, as numbers are


def table(
    columns: Mapping[str, str],
    rows: Iterable[Sequence[Cell]],
    *,
    title: str = "",
    indent: int = 0,
    width: int = 0,
) -> str:
    """Return rows of cells as aligned lines below their heads.

    Args:
        columns: head of each column, with the unit in brackets, and the format of its numbers
            (`.1f`, `d`): these are right-aligned. A column without a format holds texts,
            left-aligned; RIGHT aligns them right.
        rows: a cell a column; None shows as `-`, and a text stands as it is in a column of numbers
            too.
        title: a line above the heads.
        indent: spaces before each line but the title.
        width: characters of the terminal, to which the last column is cut; 0 for no limit.
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
    """Return a line for each name and its value, the values below each other."""
    listed = [(name, printable(str(value))) for name, value in pairs]
    width = max((len(name) for name, _ in listed), default=0)
    lines = [f"{'':<{indent}}{name:<{width}}{GAP}{value}".rstrip() for name, value in listed]
    return "\n".join([title] * bool(title) + lines)


def terminal_width() -> int:
    """Return the columns that COLUMNS or the terminal of stdout has.

    0 for a file or a pipe, which have no limit.
    """
    if (text := os.environ.get("COLUMNS", "")).isdecimal():
        return int(text)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def wrapped(text: str, first: str, width: int) -> str:
    """Return a text after `first`, in lines of so many characters below each other; 0 for one line."""
    indent = " " * len(first)
    return textwrap.fill(
        text,
        max(width, len(first) + MIN_LAST_CHARS) if width else len(first + text) + 1,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def printable(text: str) -> str:
    """Return text on one line, without what a terminal would take for a command."""
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

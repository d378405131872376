"""Tables that the planner is given: rows of a CSV, or of a list in a JSON object, and the numbers in them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gems.errors import ConfigError
from gems.planner.hybrid.quantity import Quantity

Row = Mapping[str, Any]
MAX_ROWS = 10_000


def read_document(option: str, path: Path) -> dict[str, Any]:
    """Read a JSON object, or a CSV as one with its rows under `rows`.

    Raises:
        ConfigError: no such file, or neither JSON object nor a CSV with a head.
    """
    try:
        text = path.read_text()
        if path.suffix == ".json":
            document = json.loads(text)
            if not isinstance(document, dict):
                raise ConfigError(option, path, "must hold one JSON object")
            return document
        rows: list[dict[str, Any]] = list(csv.DictReader(text.splitlines(), strict=True))
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            option, path, f"cannot be read ({why})", "give a .json or a .csv with a line of column names"
        ) from error
    return {"rows": rows}


def rows_of(option: str, path: Path, document: Mapping[str, Any], *names: str) -> Sequence[Row]:
    """Return the rows that a document holds under the first of some names that it has.

    Raises:
        ConfigError: none of the names, no row, or rows that are no mappings.
    """
    rows = next((document[name] for name in names if name in document), None)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(option, path, f"must hold rows, under {' or '.join(names)} in JSON")
    if len(rows) > MAX_ROWS:
        raise ConfigError(option, path, f"must hold at most {MAX_ROWS} rows")
    return rows


def positive(option: str, path: Path, row: Row, column: str) -> float:
    """Return a number above 0 from a row.

    Raises:
        ConfigError: the column is missing, or holds no such number.
    """
    value = row.get(column)
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    except OverflowError:
        number = math.inf
    if not 1e-30 <= number <= 1e30:
        shown = "nothing" if value in (None, "") else repr(value)
        raise ConfigError(option, path, f"column {column} holds {shown} in a row, and must be a number above 0")
    return number


def whole(option: str, path: Path, row: Row, column: str) -> int:
    """Return a whole number above 0 from a row.

    Raises:
        ConfigError: the column is missing, or holds no such number.
    """
    number = positive(option, path, row, column)
    if number != int(number) or number > 2**31:
        raise ConfigError(option, path, f"column {column} holds {number:g} in a row, and must be a whole number")
    return int(number)


def quantity(option: str, path: Path, row: Row, column: str, low: str = "low", high: str = "high") -> Quantity:
    """Return a number above 0 with the interval of its row, or without one where the row has none.

    Raises:
        ConfigError: as `positive`, or an interval that does not hold the number.
    """
    value = positive(option, path, row, column)
    if row.get(low) in (None, "") and row.get(high) in (None, ""):
        return Quantity.exact(value)
    ends = (positive(option, path, row, low), positive(option, path, row, high))
    try:
        return Quantity(value, *ends)
    except ValueError as error:
        raise ConfigError(option, path, f"column {column} {error}") from error

"""The three parts of a call of at most eight minutes."""

from __future__ import annotations

from dataclasses import replace

from scripts.gpu import claims, measure, prove
from scripts.gpu.row import Row

LIMIT_S = 480.0
FAKE_ROW_LIMIT_S = 600.0
MARGIN_S = 10.0  # of it, for what stands before and after the rows
TITLES = {1: prove.TITLE, 2: measure.TITLE, 3: claims.TITLE}
_ROWS = {1: prove.rows, 2: measure.rows, 3: claims.rows}


def rows_of(part: int, is_small: bool = False, is_fake: bool = False) -> tuple[Row, ...]:
    """Return a part's rows in order.

    Small ones for a slow device, for tests of a real or a fake one. A fake device is made of host
    memory, and shares its cores with all else that runs, so its rows wait long before they fail.
    """
    rows = _ROWS[part](is_small, "fake_cuda" if is_fake else "cuda")
    return tuple(replace(row, limit_s=FAKE_ROW_LIMIT_S) for row in rows) if is_fake else rows

"""The three parts, each for one call of at most nine minutes."""

from __future__ import annotations

from scripts.gpu import claims, measure, prove
from scripts.gpu.row import Row

LIMIT_S = 540.0
MARGIN_S = 10.0  # of it, for what stands before and after the rows
TITLES = {1: prove.TITLE, 2: measure.TITLE, 3: claims.TITLE}
_ROWS = {1: prove.rows, 2: measure.rows, 3: claims.rows}


def rows_of(part: int, is_small: bool = False, is_fake: bool = False) -> tuple[Row, ...]:
    """Return a part's rows in order; small ones for a slow device, for tests of a real or a fake one."""
    return _ROWS[part](is_small, "fake_cuda" if is_fake else "cuda")

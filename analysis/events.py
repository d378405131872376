"""Events by kind."""

from __future__ import annotations

import numpy as np

from gems.trace import KINDS


def of_kinds(events: np.ndarray, *kinds: str) -> np.ndarray:
    """Gives the mask of the events whose kind is among `kinds`, names as in a schedule's text."""
    mask: np.ndarray = np.isin(events["kind"], [KINDS.index(kind) for kind in kinds])
    return mask

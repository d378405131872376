"""The spread of ratios over many cases, as benchmarks print it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean, the least and the most of ratios; there must be one."""
    return {"mean": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}

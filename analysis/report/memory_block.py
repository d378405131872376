"""The memory curves' data: bytes over time of each rank, where they change."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.report.pack import packed
from gems.trace import Trace

SAMPLED = {"rss_bytes": "resident memory, sampled", "device_bytes": "device memory by the driver, sampled"}


def memory_block(trace: Trace, events: np.ndarray, origin_ns: int) -> dict[str, Any] | None:
    """Return the curves of bytes held on the device and in host memory, and the samples; None without any byte.

    Each curve has `offsets[lane]` where a rank's points begin in `time_ns` (from `origin_ns`) and `value_bytes`; a value
    holds until the next point.
    """
    ranks = np.unique(events["rank"])
    curves = []
    for column, name in (("device_bytes", "held on the device"), ("host_bytes", "held in host memory")):
        known = events[events[column] >= 0]
        if known[column].any():
            curves.append(_curve(name, ranks, known["rank"], known["end_ns"] - origin_ns, known[column], True))
    samples = trace.samples[np.isin(trace.samples["rank"], ranks)]
    for column, name in SAMPLED.items():
        known = samples[samples[column] > 0]
        if len(known):
            curves.append(_curve(name, ranks, known["rank"], known["t_ns"] - origin_ns, known[column], False))
    return {"ranks": ranks.tolist(), "curves": curves} if curves else None


def _curve(
    name: str, ranks: np.ndarray, rank: np.ndarray, time_ns: np.ndarray, value: np.ndarray, is_ledger: bool
) -> dict[str, Any]:
    order = np.lexsort((time_ns, rank))
    rank, time_ns, value = rank[order], time_ns[order], value[order]
    is_new = np.ones(len(value), bool)
    is_new[1:] = (value[1:] != value[:-1]) | (rank[1:] != rank[:-1])
    rank, time_ns, value = rank[is_new], time_ns[is_new], value[is_new]
    offsets = np.searchsorted(rank, [*ranks, ranks[-1] + 1])
    return {
        "name": name, "is_ledger": is_ledger, "peak_bytes": int(value.max()), "offsets": packed(offsets),
        "time_ns": packed(time_ns, is_sum=True), "value_bytes": packed(value, is_sum=True),
    }  # fmt: skip

"""Times of the stages: the median of each kind of compute on each stage."""

from __future__ import annotations

import numpy as np

from analysis.metrics.events import COMPUTE, of_kinds
from gems.trace import KINDS, Trace

NS = 1e-9


def stage_medians_s(trace: Trace) -> dict[int, dict[str, float]]:
    """Return the median duration in seconds of F, B, I, W and R by stage, over all ranks, warm-up steps left out.

    A segment's actions are summed over the segments of its stage, as one pass over the stage.
    """
    counted = trace.steps["step"][trace.steps["is_warmup"] == 0]
    events = trace.events[of_kinds(trace.events, *COMPUTE) & np.isin(trace.events["step"], counted)]
    if not len(events):
        return {}
    group = events["stage"].astype(np.int64) * len(KINDS) + events["kind"]
    keys = ("micro_batch", "direction", "step", "rank")
    order = np.lexsort([*(events[key] for key in keys), group])
    events, group = events[order], group[order]
    is_new = np.ones(len(events), bool)
    is_new[1:] = group[1:] != group[:-1]
    for key in keys:
        is_new[1:] |= events[key][1:] != events[key][:-1]
    starts = np.flatnonzero(is_new)
    passes_ns = np.add.reduceat(events["end_ns"] - events["start_ns"], starts)
    found: dict[int, dict[str, float]] = {}
    places, firsts = np.unique(group[starts], return_index=True)
    for place, times_ns in zip(places.tolist(), np.split(passes_ns, firsts[1:]), strict=True):
        stage, kind = divmod(place, len(KINDS))
        found.setdefault(stage, {})[KINDS[kind]] = float(np.median(times_ns)) * NS
    return found

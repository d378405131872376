"""Events by kind."""

from __future__ import annotations

import numpy as np

from gems.trace import KINDS, Trace

USEFUL = ("F", "B", "I", "W")
COMPUTE = (*USEFUL, "R")


def of_kinds(events: np.ndarray, *kinds: str) -> np.ndarray:
    """Return the mask of the events whose kind is among `kinds`, names as in a schedule's text."""
    mask: np.ndarray = np.isin(events["kind"], [KINDS.index(kind) for kind in kinds])
    return mask


def by_rank(events: np.ndarray) -> dict[int, np.ndarray]:
    """Return the events of each rank that has any, in their order in the trace."""
    if (np.diff(events["rank"]) < 0).any():
        events = events[np.argsort(events["rank"], kind="stable")]
    ranks, firsts = np.unique(events["rank"], return_index=True)
    return dict(zip(ranks.tolist(), np.split(events, firsts[1:]), strict=True)) if len(events) else {}


def ranks_written(trace: Trace) -> int:
    """Return the number of ranks whose events a trace holds: those of one replica if all are identical."""
    return trace.world_size // int(trace.attributes.get("identical_replicas", 1))

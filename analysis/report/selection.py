"""Which events a page holds: those of as many whole steps as there is room for, the last ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gems.trace import Trace
from gems.utils.units import counted

MAX_EVENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Selection:
    """Events that are shown, sorted by (rank, start_ns), and a note where these are not all of the trace."""

    events: np.ndarray
    note: str = ""


def select_events(trace: Trace, max_events: int = MAX_EVENTS) -> Selection:
    """Take the last whole steps that `max_events` hold; of a single step that is too large, its first ranks."""
    events = trace.events
    if len(events) <= max_events:
        return Selection(events)
    steps, counts = np.unique(events["step"], return_counts=True)
    fitting = int((np.cumsum(counts[::-1]) <= max_events).sum())
    if fitting:
        first = int(steps[len(steps) - fitting])
        note = f"shown: {counted(fitting, 'step')} from {first} on, of {counted(len(steps), 'step')} in the trace"
        return Selection(events[events["step"] >= first], note)
    last = events[events["step"] == steps[-1]]
    ranks, counts = np.unique(last["rank"], return_counts=True)
    fitting = max(int((np.cumsum(counts) <= max_events).sum()), 1)
    note = f"shown: step {int(steps[-1])} of the first {counted(fitting, 'rank')}, of {len(ranks)} in the trace"
    return Selection(last[last["rank"] <= ranks[fitting - 1]][:max_events], note)

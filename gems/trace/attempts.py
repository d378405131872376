"""Attempts: the traces of a run's attempts become one, as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gems.trace.layout import Trace

TABLES = {
    "events": ("start_ns", "end_ns"), "steps": ("start_ns", "end_ns"), "rank_steps": ("start_ns", "end_ns"),
    "samples": ("t_ns", "t_ns"),
}  # fmt: skip
GAP_NS = 1_000_000


def join_attempts(traces: Sequence[Trace]) -> Trace:
    """Join the traces of attempts, given in their order, on the clock of the first that counts.

    An attempt that went on from a checkpoint takes up the steps of those before it. What they did of the steps that it
    repeats was lost, and is left out, so each step stands once. An attempt that began at the first step, or from
    another run's state, has nothing before it. Clocks of other nodes have nothing in common, so an attempt lies by the
    time of day at its beginning, and at least GAP_NS behind the one before. The root attributes are those of the last.
    """
    chain = _chain(traces)
    if len(chain) == 1:
        return chain[0]
    tables: dict[str, list[np.ndarray]] = {name: [] for name in TABLES}
    shifts_ns: list[int] = []
    free_ns: int | None = None  # from here on no attempt before has an event
    for number, trace in enumerate(chain):
        shift_ns, span_ns = _clock_ns(trace) - _clock_ns(chain[0]), _span_ns(trace)
        if span_ns is not None:
            if free_ns is not None:
                shift_ns = max(shift_ns, free_ns - span_ns[0])
            free_ns = span_ns[1] + shift_ns + GAP_NS
        shifts_ns.append(shift_ns)
        repeated = min((_first_step(later) for later in chain[number + 1 :]), default=None)
        for name, times in TABLES.items():
            tables[name].append(_moved(getattr(trace, name), set(times), shift_ns, repeated))
    joined: dict[str, Any] = {name: np.concatenate(parts) for name, parts in tables.items()}
    events = joined["events"]
    joined["events"] = events[np.lexsort((events["start_ns"], events["rank"]))]
    attributes = chain[-1].attributes | {
        "first_step": _first_step(chain[0]),
        "attempts": [int(trace.attributes.get("attempt", 1)) for trace in chain],
        "attempt_shifts_ns": shifts_ns,
    }
    return Trace(attributes, run_yaml=chain[-1].run_yaml, **joined)


def _chain(traces: Sequence[Trace]) -> list[Trace]:
    """Return the attempts at the end of which each goes on from a state that one before it has left."""
    start = len(traces) - 1
    while start and traces[start].attributes.get("continues"):
        start -= 1
    return list(traces[start:])


def _first_step(trace: Trace) -> int:
    return int(trace.attributes.get("first_step", 0))


def _clock_ns(trace: Trace) -> int:
    """Return the time of day at which the attempt's clock said zero."""
    return int(trace.attributes.get("utc_ns", 0)) - int(trace.attributes.get("utc_at_ns", 0))


def _span_ns(trace: Trace) -> tuple[int, int] | None:
    """Return the first and the last time in a trace; None where it holds no row."""
    firsts, lasts = [], []
    for name, (start, end) in TABLES.items():
        table = getattr(trace, name)
        if len(table):
            firsts.append(int(table[start].min()))
            lasts.append(int(table[end].max()))
    return (min(firsts), max(lasts)) if firsts else None


def _moved(table: np.ndarray, times: set[str], shift_ns: int, repeated: int | None) -> np.ndarray:
    """Return a table later by `shift_ns`, without the steps from `repeated` on."""
    moved = table.copy()
    for column in times:
        moved[column] += shift_ns
    has_steps = "step" in (table.dtype.names or ())
    return moved if repeated is None or not has_steps else moved[moved["step"] < repeated]

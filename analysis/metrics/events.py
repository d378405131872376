"""Select events by kind, rank and step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gems.errors import ConfigError
from gems.trace import KINDS, Trace

USEFUL = ("F", "B", "I", "W")
COMPUTE = (*USEFUL, "R")


def of_kinds(events: np.ndarray, *kinds: str) -> np.ndarray:
    """Return the mask of the events of some kinds; names are as in a schedule's text."""
    mask: np.ndarray = np.isin(events["kind"], [KINDS.index(kind) for kind in kinds])
    return mask


def place_numbers(columns: Iterable[str], *tables: np.ndarray) -> list[np.ndarray]:
    """Return a number for each row of each table; rows with equal values in the columns share it.

    The values are from -1 on.
    """
    keys = np.zeros(sum(map(len, tables)), np.int64)
    for column in columns:
        values = np.concatenate([table[column] for table in tables]).astype(np.int64)
        keys = keys * (values.max(initial=0) + 2) + values + 1
    numbers = np.unique(keys, return_inverse=True)[1]
    return np.split(numbers, np.cumsum([len(table) for table in tables])[:-1])


def by_rank(events: np.ndarray) -> dict[int, np.ndarray]:
    """Return the events of each rank that has any, in their order in the trace."""
    if (np.diff(events["rank"]) < 0).any():
        events = events[np.argsort(events["rank"], kind="stable")]
    ranks, firsts = np.unique(events["rank"], return_index=True)
    return (
        dict(zip(ranks.tolist(), np.split(events, firsts[1:]), strict=True)) if len(events) else {}
    )


def ranks_written(trace: Trace) -> int:
    """Return the number of ranks whose events are in a trace.

    If all replicas are identical, only one of them may be there.
    """
    return trace.world_size // int(trace.attributes.get("identical_replicas", 1))


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The events of one step, and its time span from the first rank's begin to the last rank's end.

    `is_whole` is False for a step that some rank did not finish; it then spans the available
    events.
    """

    step: int
    start_ns: int
    end_ns: int
    is_whole: bool
    is_warmup: bool
    events: np.ndarray

    @property
    def label(self) -> str:
        """The step's name, with anything unusual about it."""
        not_whole = "" if self.is_whole else ", not whole: the run ended in it"
        return f"step {self.step}" + (", warm-up" if self.is_warmup else "") + not_whole

    @property
    def span_s(self) -> float:
        """The time from the first rank's begin to the last rank's end."""
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def bubble(self) -> float | None:
        """The share of ranks x time in which the ranks with events here compute nothing."""
        ranks = len(np.unique(self.events["rank"]))
        if not self.is_whole or not ranks or self.end_ns <= self.start_ns:
            return None
        compute = self.events[of_kinds(self.events, *COMPUTE)]
        busy_ns = int((compute["end_ns"] - compute["start_ns"]).sum())
        return 1.0 - busy_ns / (ranks * (self.end_ns - self.start_ns))


def step_window(trace: Trace, step: int | None = None) -> StepWindow:
    """Return one step, by default the last whole step after warm-up, or else the last step.

    Raises:
        ConfigError: The trace has no events, or none of that step.
    """
    with_events = np.unique(trace.events["step"])
    if not len(with_events):
        raise ConfigError(
            "trace", trace.source, "holds no events", "did the run end before its first step?"
        )
    if step is None:
        whole = trace.steps[np.isin(trace.steps["step"], with_events)]
        counted = whole[whole["is_warmup"] == 0]
        step = next(
            int(steps.max())
            for steps in (counted["step"], whole["step"], with_events)
            if len(steps)
        )
    if step not in with_events:
        low = int(with_events[0])
        high = int(with_events[-1])
        raise ConfigError("step", step, f"allowed: {low} to {high}, the steps with events")
    events = trace.events[trace.events["step"] == step]
    row = trace.steps[trace.steps["step"] == step]
    if len(row):
        first = row[0]
        return StepWindow(
            step,
            int(first["start_ns"]),
            int(first["end_ns"]),
            True,
            bool(first["is_warmup"]),
            events,
        )
    return StepWindow(
        step, int(events["start_ns"].min()), int(events["end_ns"].max()), False, False, events
    )

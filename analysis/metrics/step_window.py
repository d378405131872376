"""One step out of a trace: which one, when, and its events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.metrics.events import COMPUTE, of_kinds
from gems.errors import ConfigError
from gems.trace import Trace


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The events of one step and the time that it spans, from the first rank's begin to the last rank's end.

    `is_whole` is False for a step that some rank did not finish; it then spans the events that are there.
    """

    step: int
    start_ns: int
    end_ns: int
    is_whole: bool
    is_warmup: bool
    events: np.ndarray

    @property
    def label(self) -> str:
        """Return the step's name, with anything unusual about it."""
        not_whole = "" if self.is_whole else ", not whole: the run ended in it"
        return f"step {self.step}" + (", warm-up" if self.is_warmup else "") + not_whole

    @property
    def span_s(self) -> float:
        """Time from the first rank's begin to the last rank's end."""
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def bubble(self) -> float | None:
        """Share of ranks x time in which the ranks with events here compute nothing."""
        ranks = len(np.unique(self.events["rank"]))
        if not self.is_whole or not ranks or self.end_ns <= self.start_ns:
            return None
        compute = self.events[of_kinds(self.events, *COMPUTE)]
        busy_ns = int((compute["end_ns"] - compute["start_ns"]).sum())
        return 1.0 - busy_ns / (ranks * (self.end_ns - self.start_ns))


def step_window(trace: Trace, step: int | None = None) -> StepWindow:
    """Take one step; by default the last whole one that is not a warm-up step, else the last one there is.

    Raises:
        ConfigError: the trace has no events, or none of that step.
    """
    with_events = np.unique(trace.events["step"])
    if not len(with_events):
        raise ConfigError("trace", trace.source, "holds no events", "did the run end before its first step?")
    if step is None:
        step = _default_step(trace, with_events)
    if step not in with_events:
        low, high = int(with_events[0]), int(with_events[-1])
        raise ConfigError("step", step, f"allowed: {low} to {high}, the steps with events")
    events = trace.events[trace.events["step"] == step]
    row = trace.steps[trace.steps["step"] == step]
    if len(row):
        first = row[0]
        return StepWindow(step, int(first["start_ns"]), int(first["end_ns"]), True, bool(first["is_warmup"]), events)
    return StepWindow(step, int(events["start_ns"].min()), int(events["end_ns"].max()), False, False, events)


def _default_step(trace: Trace, with_events: np.ndarray) -> int:
    whole = trace.steps[np.isin(trace.steps["step"], with_events)]
    counted = whole[whole["is_warmup"] == 0]
    for candidates in (counted["step"], whole["step"], with_events):
        if len(candidates):
            return int(candidates.max())
    raise AssertionError("a trace with events has a step")

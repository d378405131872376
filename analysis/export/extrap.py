"""Step times for Extra-P, as its JSON lines: a line a step, steps of one point being repetitions of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.scaling.point_reading import read_points


def extrap_lines(runs: Sequence[Path]) -> Iterator[str]:
    """Yield `{"params": {"p": ranks}, "metric": "time", "callpath": "step", "value": seconds}` for each counted step.

    With several schedules, or runs of several sources, these are told apart by the callpath: `step->1f1b, simulated`.

    Raises:
        ConfigError: a run without a trace, or without a step after warm-up.
    """
    points = read_points(runs)
    lines = {(point.line, point.source) for point in points}
    for point in points:
        callpath = "step" if len(lines) == 1 else f"step->{point.line}, {point.source}"
        for seconds in point.step_s:
            measured = {"params": {"p": point.ranks}, "metric": "time", "callpath": callpath, "value": seconds}
            yield json.dumps(measured) + "\n"

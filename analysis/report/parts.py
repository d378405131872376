"""What else there is in this package for a report to show; each part is asked for in this one place."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gems.errors import ConfigError
from gems.trace import Trace


@dataclass(frozen=True, slots=True)
class Causes:
    """Where the lost time of a run went: seconds of a step by cause, mean over the ranks and for each rank.

    `step_s` is `ideal_s` and all of `run_s` together; `waterfall` is the picture of it, an SVG.
    """

    step_s: float
    ideal_s: float
    run_s: dict[str, float]
    by_rank_s: dict[str, tuple[float, ...]]
    waterfall: bytes | None


def causes_of(trace: Trace) -> Causes | None:
    """Return what the step's time was lost to; None where it is not computed here, or the trace cannot tell."""
    attribution = _module("analysis.attribution")
    if attribution is None:
        return None
    try:
        found = attribution.attribution_of(trace)
    except ConfigError:
        return None
    run_s = {str(cause): float(seconds) for cause, seconds in found.run_s.items()}
    by_rank_s = {str(cause): tuple(map(float, seconds)) for cause, seconds in found.causes_s.items()}
    return Causes(float(found.step_s), float(found.ideal_s), run_s, by_rank_s, _waterfall(found))


def _waterfall(found: Any) -> bytes | None:
    waterfall = _module("analysis.plots.waterfall")
    if waterfall is None:
        return None
    with TemporaryDirectory() as folder:
        path = Path(folder) / "waterfall.svg"
        waterfall.draw_waterfall(found, path)
        return path.read_bytes()


def _module(name: str) -> Any | None:
    """Import a module of this package, or gives None where there is none of that name."""
    return import_module(name) if find_spec(name) is not None else None

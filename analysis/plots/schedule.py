"""The drawing of a schedule, rank x time, from its file alone."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from analysis.metrics.events import StepWindow
from analysis.plots.figure import check_picture_path, save_figure
from analysis.plots.timeline import MAX_LANES, lanes_figure
from gems.errors import ConfigError
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, Kind
from gems.schedule.costs import StageCosts, uniform
from gems.schedule.formats.schedule_json import from_json
from gems.schedule.formats.torch_csv import from_torch_csv
from gems.schedule.lower import compute_only
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.schedule.validate import validate
from gems.trace import DTYPES, KINDS, STREAMS, Trace, root_attributes
from gems.utils.units import counted, number

UNIT_NS = 1_000_000  # one unit of the costs is one ms on the picture's axis
_STREAM_OF = {Kind.OFFLOAD: STREAMS.index("copy_out"), Kind.PREFETCH: STREAMS.index("copy_in")}


def draw_schedule(path: Path, out: Path) -> Simulation:
    """Draw a schedule's file as PNG, PDF or SVG by the suffix, and return its simulation.

    The compute actions are drawn at their simulated times, without links. The costs are those in
    the file (as `gems schedule --json` writes them), or else f = i = w = 1 for a rank's part of the
    model.

    Raises:
        ConfigError: The file contains no schedule, or the picture cannot be written.
        ScheduleError: The schedule would not run.
    """
    check_picture_path(out)
    schedule, costs = read_schedule(path)
    drawn = compute_only(validate(schedule))
    simulated = simulate(drawn, costs)
    title = (
        (
            f"{drawn.name}: {counted(drawn.num_ranks, 'rank')}, {counted(drawn.num_stages, 'stage')}, "
            f"{counted(drawn.num_micro_batches, 'micro-batch', 'es')}"
        ),
        (
            f"{number(simulated.span)} units, efficiency {100 * simulated.efficiency:.1f} %, "
            f"peak {number(max(simulated.peak))} micro-batches of activations"
        ),
    )
    trace, window = _as_trace(drawn, simulated)
    ranks = np.arange(min(drawn.num_ranks, MAX_LANES))
    figure, axes = lanes_figure(trace, window, ranks, title)
    axes.xaxis.label.set_text("time (units of the costs)")
    save_figure(figure, out)
    return simulated


def read_schedule(path: Path) -> tuple[Schedule, StageCosts]:
    """Read a schedule as JSON or as torch's CSV, and the costs of its stages.

    Raises:
        ConfigError: The file does not exist, or contains no schedule or costs that do not match its
            stages.
    """
    try:
        text = path.read_text()
        document: Any = {} if path.suffix == ".csv" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "schedule", path, f"is no schedule ({error})", "give a file of `gems schedule --json`"
        ) from error
    schedule = from_torch_csv(text, path.stem) if path.suffix == ".csv" else from_json(document)
    given = document.get("costs")
    if given is None:
        return schedule, uniform(schedule.num_ranks, schedule.num_stages)
    try:
        costs = StageCosts.from_json(given)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError("costs", path, f"are not costs of stages ({error})") from error
    lengths = {len(value) for field in fields(costs) if (value := getattr(costs, field.name))}
    if lengths != {schedule.num_stages}:
        raise ConfigError(
            "costs", path, f"must have {schedule.num_stages} entries each, one a stage"
        )
    return schedule, costs


def _as_trace(schedule: Schedule, simulated: Simulation) -> tuple[Trace, StepWindow]:
    """Return the compute actions and copies as the events of one step."""
    rows = [
        (
            rank,
            0,
            KINDS.index(action.kind.value),
            action.stage,
            -1 if action.segment is None else action.segment,
            action.direction,
            action.micro_batch,
            _STREAM_OF.get(action.kind, STREAMS.index("compute")),
            round(start * UNIT_NS),
            round(end * UNIT_NS),
            0,
            0,
            0,
        )
        for rank, row in enumerate(schedule.rank_schedules)
        for action, start, end in zip(row, simulated.start[rank], simulated.end[rank], strict=True)
        if action.kind in COMPUTE_KINDS or action.kind in COPY_KINDS
    ]
    events = np.array(rows, DTYPES["events"])
    trace = Trace(root_attributes("simulated", "", schedule.num_ranks), events)
    return trace, StepWindow(0, 0, round(simulated.span * UNIT_NS), True, False, events)

"""Simulate a run and write its trace.

This is the program of a simulated run: `python -m gems.runs.simulated_run RUN_FOLDER`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from gems import __version__
from gems.config.resolve import run_id
from gems.config.schema import MachineConfig, RunSpec
from gems.errors import ConfigError, GemsError
from gems.memory.case import PlanOutcome
from gems.runs.folder import RunFolder
from gems.schedule.action import (
    BLOCKING_KINDS,
    COMPUTE_KINDS,
    COPY_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    Kind,
)
from gems.schedule.dependencies import boundary_of
from gems.schedule.memory import RankMemory, memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation
from gems.simulation.costs import RunCosts, counts_units
from gems.simulation.jitter import noisy_steps
from gems.trace import DTYPES, KINDS, STREAMS, TIME_UNIT, Trace, root_attributes, write_trace
from gems.utils.atomic_io import read_json, write_json

MAX_EVENTS = 4_000_000
MAX_NOISY_STEPS = 100
_STREAM_OF = {
    **dict.fromkeys(COMPUTE_KINDS | {Kind.REDUCE_GRAD, Kind.STEP}, STREAMS.index("compute")),
    **dict.fromkeys(SEND_KINDS | RECV_KINDS | {Kind.START_REDUCE}, STREAMS.index("link")),
    Kind.OFFLOAD: STREAMS.index("copy_out"),
    Kind.PREFETCH: STREAMS.index("copy_in"),
}
_CODE_OF = {kind: KINDS.index(kind.value) for kind in Kind}
_INPUT = KINDS.index("INPUT")


def main(argv: list[str]) -> int:
    """Simulate a prepared run; print an error of this toolkit as one line on stderr."""
    if len(argv) != 1:
        print("usage: python -m gems.runs.simulated_run RUN_FOLDER", file=sys.stderr)
        return 2
    folder = RunFolder(Path(argv[0]))
    try:
        spec = folder.read_run()
        schedule = folder.read_schedule()
        trace = simulated_trace(spec, schedule)
        trace.run_yaml = folder.traced_yaml()
        trace.attributes["git_commit"] = read_json(folder.provenance_json).get(
            "git_commit", "unknown"
        )
        write_trace(folder.trace_h5, trace)
        write_json(folder.result_json, _result(trace))
    except (OSError, GemsError) as error:
        if isinstance(error, OSError):
            error = ConfigError("run folder", folder.path, f"cannot write there ({error.strerror})")
        print(f"gems: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def simulated_trace(spec: RunSpec, schedule: Schedule) -> Trace:
    """Simulate one step, and build the trace of a run that repeats it.

    With machine.noise, up to `MAX_NOISY_STEPS` different steps are drawn before they repeat. All
    replicas are equal, so the events are those of replica 0, and the root attribute
    `identical_replicas` counts the replicas. A very long run is cut to `MAX_EVENTS`. Device bytes
    are activations and message buffers; the attribute `param_bytes` has the parameters of each
    rank.

    Raises:
        ScheduleError: The schedule would not run.
    """
    outcome = RunCosts.of(spec).kept(schedule)
    cost = spec.cost
    most = MAX_EVENTS // max(1, sum(map(len, schedule.rank_schedules)))
    num_steps = min(spec.train.steps, max(spec.benchmark.skip_steps + 1, most))
    noise = spec.machine.noise
    drawn = (
        noisy_steps(outcome, noise, spec.seed, min(num_steps, MAX_NOISY_STEPS))
        if noise
        else [outcome.simulation]
    )
    memory = [
        memory_over_time(schedule, outcome.costs, step, cost.activation_bytes, cost.param_bytes)
        for step in drawn
    ]
    events = [
        _events(outcome, step, rank_memory, cost.activation_bytes)
        for step, rank_memory in zip(drawn, memory, strict=True)
    ]
    spans_ns = [round(drawn[k % len(drawn)].span * 1e9) for k in range(num_steps)]
    starts_ns = [0, *accumulate(spans_ns)]
    ends_ns = [
        [start + round(max(row, default=0.0) * 1e9) for row in drawn[k % len(drawn)].end]
        for k, start in enumerate(starts_ns[:-1])
    ]
    step_rows = partial(_step_rows, spec.parallel.global_batch, spec.benchmark.skip_steps)
    replicas = spec.parallel.replicas
    is_in_units = counts_units(cost, spec.memory, spec.machine)
    trace = Trace(
        attributes=root_attributes(
            "simulated",
            run_id(spec),
            spec.world_size,
            identical_replicas=replicas,
            steps_asked=spec.train.steps,
            **({TIME_UNIT: "unit"} if is_in_units else {}),
            **_attributes(spec.machine, replicas, memory),
        ),
        events=_all_steps(events, starts_ns[:-1]),
        steps=step_rows("steps", starts_ns[:-1], starts_ns[1:]),
        rank_steps=np.concatenate(
            [
                step_rows("rank_steps", starts_ns[:-1], ends, rank)
                for rank, ends in enumerate(zip(*ends_ns, strict=True))
            ]
        ),
        boundaries=tuple(spec.parallel.boundaries or ()),
    )
    trace.record(schedule)
    return trace


def _attributes(
    machine: MachineConfig, replicas: int, memory: list[tuple[RankMemory, ...]]
) -> dict[str, object]:
    """Return root attributes of the machine, and the peak bytes of each rank over all steps."""
    known = {
        "calibrated_from": machine.calibrated_from,
        "held_out_error": machine.held_out_error,
        "noise": machine.noise or None,
    }
    peaks = [
        round(max(step.peak - step.parameters for step in steps))
        for steps in zip(*memory, strict=True)
    ]
    return {
        "device": "simulated",
        "clock": "simulated",
        "versions": [f"gems {__version__}", f"numpy {np.__version__}"],
        "param_bytes": [round(rank.parameters) for rank in memory[0]] * replicas,
        "peak_allocated_bytes": peaks * replicas,
        **{name: value for name, value in known.items() if value is not None},
    }


def _step_rows(
    images: int,
    num_warmup: int,
    table: str,
    starts_ns: Sequence[int],
    ends_ns: Sequence[int],
    rank: int = 0,
) -> np.ndarray:
    """Return a row for each step, without loss, gradients and learning rate."""
    rows = np.zeros(len(starts_ns), DTYPES[table])
    if table == "rank_steps":
        rows["rank"] = rank
    else:
        rows["attempt"] = 1
    rows["step"] = range(len(rows))
    rows["start_ns"] = starts_ns
    rows["end_ns"] = ends_ns
    rows["images"] = images
    rows["is_warmup"] = rows["step"] < num_warmup
    for name in ("loss", "grad_norm", "learning_rate"):
        rows[name] = math.nan
    return rows


def _events(
    outcome: PlanOutcome, step: Simulation, memory: tuple[RankMemory, ...], activation_bytes: int
) -> np.ndarray:
    """Return the events of one step of replica 0, sorted by (rank, start_ns)."""
    schedule = outcome.schedule
    costs = outcome.costs
    pace = outcome.paces[0]
    rows = []
    for rank, actions in enumerate(schedule.rank_schedules):
        inputs_ready = pace.inputs_ready(schedule, rank)
        free = 0.0
        for action, start, end in zip(actions, step.start[rank], step.end[rank], strict=True):
            kind, stage, micro_batch, direction, segment = action
            ready = inputs_ready.get(action, 0.0)
            if ready > free:
                resident = memory[rank].at(ready)
                rows.append(
                    (
                        rank,
                        0,
                        _INPUT,
                        stage,
                        -1,
                        direction,
                        micro_batch,
                        STREAMS.index("compute"),
                        round(free * 1e9),
                        round(ready * 1e9),
                        0,
                        round(resident.device),
                        round(resident.host),
                    )
                )
            free = end if kind in BLOCKING_KINDS else free
            resident = memory[rank].at(end)
            moved_bytes = 0.0
            if kind in SEND_KINDS | RECV_KINDS:
                moved_bytes = costs.boundary_bytes[boundary_of(action)]
            elif kind in COPY_KINDS:
                moved_bytes = costs.activation[stage] * activation_bytes
            rows.append(
                (
                    rank,
                    0,
                    _CODE_OF[kind],
                    stage,
                    -1 if segment is None else segment,
                    direction,
                    -1 if micro_batch is None else micro_batch,
                    _STREAM_OF[kind],
                    round(start * 1e9),
                    round(end * 1e9),
                    round(moved_bytes),
                    round(resident.device),
                    round(resident.host),
                )
            )
    events = np.array(rows, DTYPES["events"])
    sorted_events: np.ndarray = events[np.lexsort((events["start_ns"], events["rank"]))]
    return sorted_events


def _all_steps(events: list[np.ndarray], starts_ns: list[int]) -> np.ndarray:
    """Return the events of all steps, sorted by (rank, start_ns); drawn steps repeat."""
    steps = [events[k % len(events)] for k in range(len(starts_ns))]
    lengths = list(map(len, steps))
    repeated = np.concatenate(steps)
    starts = np.repeat(np.array(starts_ns), lengths)
    repeated["step"] = np.repeat(np.arange(len(starts_ns)), lengths)
    repeated["start_ns"] += starts
    repeated["end_ns"] += starts
    sorted_events: np.ndarray = repeated[np.argsort(repeated["rank"], kind="stable")]
    return sorted_events


def _result(trace: Trace) -> dict[str, object]:
    """Return the results that rank 0 of a real run reports, and the median time of a step."""
    counted = trace.steps[trace.steps["is_warmup"] == 0]
    step_s = float(np.median(counted["end_ns"] - counted["start_ns"])) * 1e-9
    return {
        "num_steps": len(trace.steps),
        "step_s": step_s,
        "images_per_s": float(trace.steps[0]["images"]) / step_s,
        "schedule_sha256": trace.schedule_sha256,
        "schedule_rows": list(trace.schedule_rows),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

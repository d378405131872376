"""Write the trace that a run would leave, from a simulation of it.

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
from gems.config.schema import RunSpec
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
    """Simulate a prepared run; an error of ours is one line on stderr."""
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
    """Build the trace of a simulated run: one step is simulated, and repeated.

    With machine.noise steps differ: `MAX_NOISY_STEPS` of them are drawn, and repeated after that.
    Replicas are alike, so the events are those of replica 0; the root attribute
    `identical_replicas` is the number that it stands for. Of a very long run fewer steps are
    written. Bytes on the device are activations and the buffers of messages; parameters are in the
    attribute `param_bytes`, a rank's.

    Raises:
        ScheduleError: the schedule would not run.
    """
    kept = RunCosts.of(spec).kept(schedule)
    cost = spec.cost
    most = MAX_EVENTS // max(1, sum(map(len, schedule.rank_schedules)))
    num_steps = min(spec.train.steps, max(spec.benchmark.skip_steps + 1, most))
    noise = spec.machine.noise
    drawn = (
        noisy_steps(kept, noise, spec.seed, min(num_steps, MAX_NOISY_STEPS))
        if noise
        else [kept.simulation]
    )
    memory = [
        memory_over_time(schedule, kept.costs, step, cost.activation_bytes, cost.param_bytes)
        for step in drawn
    ]
    events = [
        _events(kept, step, held, cost.activation_bytes)
        for step, held in zip(drawn, memory, strict=True)
    ]
    spans_ns = [round(drawn[k % len(drawn)].span * 1e9) for k in range(num_steps)]
    starts_ns = [0, *accumulate(spans_ns)]
    ends_ns = [
        [start + round(max(row, default=0.0) * 1e9) for row in drawn[k % len(drawn)].end]
        for k, start in enumerate(starts_ns[:-1])
    ]
    step_rows = partial(_step_rows, spec.parallel.global_batch, spec.benchmark.skip_steps)
    trace = Trace(
        attributes=_attributes(spec, memory),
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


def _attributes(spec: RunSpec, memory: list[tuple[RankMemory, ...]]) -> dict[str, object]:
    """Return the root attributes, with the bytes of each rank over all drawn steps."""
    replicas = spec.parallel.replicas
    machine = spec.machine
    known = {  # of the machine, and of how far predictions with it were off
        "calibrated_from": machine.calibrated_from,
        "held_out_error": machine.held_out_error,
        "noise": machine.noise or None,
        TIME_UNIT: "unit" if counts_units(spec.cost, spec.memory, machine) else None,
    }
    peaks = [
        round(max(rank.peak - rank.parameters for rank in each))
        for each in zip(*memory, strict=True)
    ]
    return root_attributes(
        "simulated",
        run_id(spec),
        spec.world_size,
        device="simulated",
        clock="simulated",
        versions=[f"gems {__version__}", f"numpy {np.__version__}"],
        identical_replicas=replicas,
        param_bytes=[round(rank.parameters) for rank in memory[0]] * replicas,
        peak_allocated_bytes=peaks * replicas,
        steps_asked=spec.train.steps,
        **{name: value for name, value in known.items() if value is not None},
    )


def _step_rows(
    images: int,
    num_warmup: int,
    table: str,
    starts_ns: Sequence[int],
    ends_ns: Sequence[int],
    rank: int = 0,
) -> np.ndarray:
    """Return a row for each step of a run that trains nothing."""
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
    kept: PlanOutcome, step: Simulation, memory: tuple[RankMemory, ...], activation_bytes: int
) -> np.ndarray:
    """Return the events of one step of replica 0, sorted by (rank, start_ns)."""
    schedule = kept.schedule
    costs = kept.costs
    pace = kept.paces[0]
    rows = []
    for rank, actions in enumerate(schedule.rank_schedules):
        inputs_ready = pace.inputs_ready(schedule, rank)
        free = 0.0
        for action, start, end in zip(actions, step.start[rank], step.end[rank], strict=True):
            kind, stage, micro_batch, direction, segment = action
            ready = inputs_ready.get(action, 0.0)
            if ready > free:
                held = memory[rank].at(ready)
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
                        round(held.device),
                        round(held.host),
                    )
                )
            free = end if kind in BLOCKING_KINDS else free
            held = memory[rank].at(end)
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
                    round(held.device),
                    round(held.host),
                )
            )
    events = np.array(rows, DTYPES["events"])
    sorted_events: np.ndarray = events[np.lexsort((events["start_ns"], events["rank"]))]
    return sorted_events


def _all_steps(events: list[np.ndarray], starts_ns: list[int]) -> np.ndarray:
    """Return the events of all steps, sorted by (rank, start_ns); drawn steps repeat."""
    steps = [events[k % len(events)] for k in range(len(starts_ns))]
    lengths = list(map(len, steps))
    made = np.concatenate(steps)
    starts = np.repeat(np.array(starts_ns), lengths)
    made["step"] = np.repeat(np.arange(len(starts_ns)), lengths)
    made["start_ns"] += starts
    made["end_ns"] += starts
    sorted_events: np.ndarray = made[np.argsort(made["rank"], kind="stable")]
    return sorted_events


def _result(trace: Trace) -> dict[str, object]:
    """Return what rank 0 of a real run would know, and the median time of a step."""
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

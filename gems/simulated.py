"""The program of a simulated run: `python -m gems.simulated RUN_FOLDER` writes the trace that a run would leave."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from gems import __version__
from gems.config import RunSpec
from gems.errors import ConfigError, GemsError
from gems.json_files import read_json, write_json
from gems.program import costs_of, play
from gems.resolve import global_batch
from gems.runfolder import RunFolder
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.costs import StageCosts
from gems.schedule.memory import RankMemory, memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation
from gems.signature import signature
from gems.trace import DTYPES, KINDS, STREAMS, Trace, root_attributes, write_trace

MAX_EVENTS = 4_000_000
_STREAM_OF = {
    **dict.fromkeys(COMPUTE_KINDS | {Kind.REDUCE_GRAD, Kind.STEP}, STREAMS.index("compute")),
    **dict.fromkeys(SEND_KINDS | RECV_KINDS, STREAMS.index("link")),
    Kind.OFFLOAD: STREAMS.index("copy_out"),
    Kind.PREFETCH: STREAMS.index("copy_in"),
}
_CODE_OF = {Kind(name): code for code, name in enumerate(KINDS)}


def main(argv: list[str]) -> int:
    """Simulates a prepared run; an error of ours is one line on stderr."""
    if len(argv) != 1:
        print("usage: python -m gems.simulated RUN_FOLDER", file=sys.stderr)
        return 2
    folder = RunFolder(Path(argv[0]))
    try:
        spec = folder.read_spec()
        schedule = folder.read_schedule()
        trace = simulated_trace(spec, schedule)
        trace.run_yaml = folder.run_yaml.read_text()
        trace.attributes["git_commit"] = read_json(folder.provenance_json).get("git_commit", "unknown")
        write_trace(folder.trace_h5, trace)
        write_json(folder.result_json, _result(trace))
    except OSError as error:
        refused = ConfigError("run folder", folder.path, f"cannot write there ({error.strerror})")
        print(f"gems: {refused}", file=sys.stderr)
        return refused.exit_code
    except GemsError as error:
        print(f"gems: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def simulated_trace(spec: RunSpec, schedule: Schedule) -> Trace:
    """Builds the trace of a run on paper: one step is simulated, and the others are the same one later.

    Replicas are alike, so that the events are those of replica 0 alone; the root attribute `identical_replicas` says
    how many stand for it. Of a very long run fewer steps are written, as their figures are all the same. Bytes on the
    device are activations and the buffers of messages; parameters are in the attribute `param_bytes`, a rank's.

    Raises:
        ScheduleError: the schedule would not run.
    """
    costs, cost = costs_of(spec, schedule.placement), spec.cost
    _, played = play(spec, schedule)
    memory = memory_over_time(schedule, costs, played, cost.activation_bytes, cost.param_bytes)
    unit_ns = cost.unit_s * 1e9
    one = _events(spec, schedule, costs, played, memory)
    num_steps = min(spec.train.steps, max(spec.train.warmup_steps + 1, MAX_EVENTS // max(1, len(one))))
    span_ns, images = round(played.span * unit_ns), global_batch(spec)
    steps = [
        (k, k * span_ns, (k + 1) * span_ns, images, math.nan, k < spec.train.warmup_steps, 1)
        for k in range(num_steps)
    ]
    ends_ns = [round(max(row, default=0.0) * unit_ns) for row in played.end]
    rank_steps = [
        (rank, k, k * span_ns, k * span_ns + end_ns, images, math.nan, k < spec.train.warmup_steps)
        for rank, end_ns in enumerate(ends_ns)
        for k in range(num_steps)
    ]
    peaks = [round(rank.peak - rank.parameters) for rank in memory]
    replicas = spec.parallel.replicas
    attributes = root_attributes(
        "simulated", signature(spec), spec.world_size, device="simulated", clock="simulated",
        versions=[f"gems {__version__}", f"numpy {np.__version__}"],
        identical_replicas=replicas, param_bytes=[round(rank.parameters) for rank in memory] * replicas,
        peak_allocated_bytes=peaks * replicas, steps_asked=spec.train.steps,
    )  # fmt: skip
    return Trace(
        attributes=attributes,
        events=_repeated(one, num_steps, span_ns),
        steps=np.array(steps, DTYPES["steps"]),
        rank_steps=np.array(rank_steps, DTYPES["rank_steps"]),
        schedule_rows=tuple(" ".join(map(str, row)) for row in schedule.rows),
        schedule_sha256=schedule.digest(),
        boundaries=tuple(spec.parallel.boundaries or ()),
    )


def _events(
    spec: RunSpec,
    schedule: Schedule,
    costs: StageCosts,
    played: Simulation,
    memory: tuple[RankMemory, ...],
) -> np.ndarray:
    """Gives the events of one step of replica 0, sorted by (rank, start_ns)."""
    unit_ns, activation_bytes = spec.cost.unit_s * 1e9, spec.cost.activation_bytes
    rows = []
    for rank, row in enumerate(schedule.rows):
        for action, start, end in zip(row, played.start[rank], played.end[rank], strict=True):
            held = memory[rank].at(end)
            rows.append((
                rank, 0, _CODE_OF[action.kind], action.stage, -1 if action.segment is None else action.segment,
                action.direction, -1 if action.micro_batch is None else action.micro_batch, _STREAM_OF[action.kind],
                round(start * unit_ns), round(end * unit_ns), round(_moved_bytes(action, costs, activation_bytes)),
                round(held.device), round(held.host),
            ))  # fmt: skip
    events = np.array(rows, DTYPES["events"])
    sorted_events: np.ndarray = events[np.lexsort((events["start_ns"], events["rank"]))]
    return sorted_events


def _moved_bytes(action: Action, costs: StageCosts, activation_bytes: int) -> float:
    """Gives the bytes that a transfer or a copy carries."""
    if action.kind is Kind.SEND_F or action.kind is Kind.RECV_B:
        return costs.boundary_bytes[action.stage]
    if action.kind is Kind.SEND_B or action.kind is Kind.RECV_F:
        return costs.boundary_bytes[action.stage - 1]
    return costs.activation[action.stage] * activation_bytes if action.kind in COPY_KINDS else 0.0


def _repeated(events: np.ndarray, num_steps: int, span_ns: int) -> np.ndarray:
    """Gives the events of all steps, sorted by (rank, start_ns)."""
    repeated = np.tile(events, num_steps)
    step = np.repeat(np.arange(num_steps), len(events))
    repeated["step"] = step
    repeated["start_ns"] += step * span_ns
    repeated["end_ns"] += step * span_ns
    sorted_events: np.ndarray = repeated[np.argsort(repeated["rank"], kind="stable")]
    return sorted_events


def _result(trace: Trace) -> dict[str, object]:
    """Gives what rank 0 of a real run would know, and the time of a step."""
    first = trace.steps[0]
    step_s = float(first["end_ns"] - first["start_ns"]) * 1e-9
    return {
        "num_steps": len(trace.steps),
        "step_s": step_s,
        "images_per_s": float(first["images"]) / step_s,
        "schedule_sha256": trace.schedule_sha256,
        "schedule_rows": list(trace.schedule_rows),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

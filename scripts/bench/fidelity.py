"""Held-out fidelity: predicted step times and peaks beside runs that no constant was fitted to.

Emulated: the links are calibrated by a probe of 8 ranks (`scripts.calibrate`), and 14 other runs of
4 to 16 ranks are compared with their simulation: schedules, micro-batches, caps, message sizes and
replicas. Real: a tiny ResNet on 2 ranks, its layers profiled on this machine, with the pace that
four runs told as `make calibrate` takes it (`scripts.bench.pace`); four other runs of other sizes
and schedules are compared, and the four again, to detect a machine that changes its speed. The peak
of an emulated run is that of its median step; that of the whole run, which one late message
decides, is shown beside it.

Prints a table on stderr and JSON on stdout, with the median and the worst error; the exit code is 1
above the limits. The error can be kept beside a calibration: `python -m scripts.calibrate
--held-out`. Takes `--part emulated|real`, `--steps N` and Hydra overrides for every case. Needs an
idle machine: it prints how busy it was.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from analysis.io.load import load_parts
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.plan.draft import Draft
from gems.schedule.action import Action
from gems.schedule.costs import StageCosts
from gems.schedule.memory import memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation
from gems.simulation.calibration import calibration_of
from gems.trace import KINDS, Trace
from scripts.bench.pace import (
    CALIBRATING,
    Case,
    Step,
    fastest,
    pace_of,
    paired,
    predicted,
    real,
    real_run,
)
from scripts.bench.pace import observed as observed_real
from scripts.bench.rig import (
    Table,
    answered,
    composed,
    counted_steps_s,
    finished_run,
    log,
    machine,
    options,
)
from scripts.calibrate import take_probe

# median and worst of the step's; every peak's
STEP_LIMITS = (0.03, 0.08)
PEAK_LIMIT = 0.05
MORE_STEPS = 10  # of a real run, whose steps are short, for one of an emulated run
EMULATED = (
    "machine=emulated data=synthetic cost=uniform cost.unit_s=0.01 cost.activation_bytes=1000000"
    " benchmark.skip_steps=1"
)
EVENT_KEY = ("kind", "stage", "segment", "direction", "micro_batch")
PARTS = ("emulated", "real")


def emulated(
    schedule: str, ranks: int, micro_batches: int, size_bytes: int, more: str = ""
) -> Case:
    """Return an emulated case; `size_bytes` is the message from one stage to the next."""
    words = (
        f"schedule={schedule} parallel.partitions={ranks} parallel.micro_batches={micro_batches} "
        f"cost.boundary_bytes={size_bytes} {more}"
    )
    return (
        f"{schedule} P={ranks} N={micro_batches} {size_bytes // 1000} kB"
        f" {more.rpartition('.')[2]}".rstrip(),
        words,
    )


HELD_OUT_EMULATED = (
    emulated("1f1b", 4, 8, 100_000),
    emulated("gems_master", 4, 8, 1_000_000),
    emulated("gpipe", 4, 16, 4_000_000),
    emulated("zb_h1", 4, 8, 1_000_000),
    emulated("capped", 6, 12, 500_000, "schedule.activation_cap=1"),
    emulated("1f1b", 8, 16, 1_000_000),
    emulated("gems_master", 8, 8, 1_000_000),
    emulated("zb_v", 8, 16, 100_000),
    emulated("capped", 8, 16, 1_000_000, "schedule.activation_cap=2"),
    emulated("chimera", 8, 8, 2_000_000),
    emulated("interleaved_1f1b", 8, 16, 200_000),
    emulated("gems_master", 4, 4, 500_000, "parallel.replicas=2"),
    emulated("1f1b", 12, 24, 1_000_000),
    emulated("gems_master", 16, 4, 1_000_000),
)
HELD_OUT_REAL = (
    real("1f1b", 64, 16, 4),
    real("gems_master", 96, 8, 2),
    real("zb_h1", 128, 8, 1),
    real("gpipe", 128, 4, 2),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts and return 1 if the errors are above the limits."""
    part = {"choices": PARTS, "action": "append"}
    overrides = {"nargs": "*"}
    arguments = options(__doc__, argv, only="", part=part, steps=4, overrides=overrides)
    facts: dict[str, Any] = machine()
    table = Table(
        "case:<52",
        "predicted ms=predicted_s:>14.1f",
        "observed ms=observed_s:>13.1f",
        "error %=step_error:>+9.2f",
        "peak %=peak_error:>+8.2f",
        "of run %=most_error:>+10.2f",
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:  # profiles are to be of this hour
        for part in arguments.part or PARTS:
            measure = emulated_rows if part == "emulated" else real_rows
            rows += table.rows(
                measure(
                    arguments.steps,
                    [f"cache_dir={cache}", *arguments.overrides],
                    facts,
                    arguments.only,
                )
            )
    answer = summary(rows)
    log(
        f"step: median {answer['median_error']:.1%}, worst {answer['worst_error']:.1%}; peak: worst"
        f" {answer['worst_peak_error']:.1%}; {len(rows)} runs; load at the end"
        f" {os.getloadavg()[0]:.1f}"
    )
    return answered(
        {**answer, **facts, "load_at_end": os.getloadavg()[0]}, not answer["is_within_limits"]
    )


def compared(part: str, name: str, predicted: Step, seen: Step) -> dict[str, Any]:
    """Return a held-out run beside its prediction; errors are predicted over observed, less 1."""
    return {
        "part": part,
        "case": name,
        "predicted_s": predicted.step_s,
        "observed_s": seen.step_s,
        "step_error": predicted.step_s / seen.step_s - 1.0,
        "peak_error": predicted.peak_bytes / seen.peak_bytes - 1.0,
        "most_error": predicted.peak_bytes / seen.most_bytes - 1.0,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median and worst errors, of 1 and without sign, over all rows."""
    steps = [abs(row["step_error"]) for row in rows]
    median = statistics.median(steps)
    worst = max(steps)
    peak = max(abs(row["peak_error"]) for row in rows)
    return {
        "median_error": median,
        "worst_error": worst,
        "worst_peak_error": peak,
        "is_within_limits": (
            median <= STEP_LIMITS[0] and worst <= STEP_LIMITS[1] and peak <= PEAK_LIMIT
        ),
        "rows": rows,
    }


def emulated_rows(
    steps: int, overrides: list[str], facts: dict[str, Any], only: str
) -> Iterator[dict[str, Any]]:
    """Yield the emulated runs beside their predictions by links that the probe calibrated."""
    links = calibration_of(take_probe("emulated"))
    facts["emulated_machine"] = links.machine()
    for name, words in HELD_OUT_EMULATED:
        if only in name:
            spec = composed(EMULATED, words, f"train.steps={steps + 1}", overrides)
            yield compared("emulated", name, predicted(spec, links), observed(spec))


def real_rows(
    steps: int, overrides: list[str], facts: dict[str, Any], only: str
) -> Iterator[dict[str, Any]]:
    """Yield real runs beside the simulation of their layers at the pace of earlier runs."""
    links = calibration_of(take_probe("real"))
    facts["real_machine"] = links.machine()
    steps *= MORE_STEPS
    before = [paired(case, links, steps, overrides) for case in CALIBRATING]
    pace = pace_of(before)
    for case in HELD_OUT_REAL:
        if only in case[0]:
            spec = real_run(case, steps, overrides)
            there = replace(spec.machine, pace_factor=pace.factor, pace_pass_s=pace.pass_s)
            yield compared(
                "real", case[0], fastest(replace(spec, machine=there), links), observed_real(spec)
            )
    after = [paired(case, links, steps, overrides) for case in CALIBRATING]
    facts["real_pace"] = asdict(pace) | {
        when: [pace.time_s(alone.step_s, passes) / seen.step_s - 1 for alone, passes, seen in some]
        for when, some in (("before", before), ("after", after))
    }


def observed(spec: RunSpec) -> Step:
    """Run an emulated configuration on this machine and read its trace.

    The median of its counted steps counts.
    """
    with finished_run(spec) as folder:
        step_s = float(np.median(counted_steps_s(folder)))
        trace = load_parts(folder.path).trace
        schedule = folder.read_schedule()
        cost = spec.cost
        costs = Draft(spec).costs.stages(schedule.placement)
        peaks = step_peaks(trace, schedule, costs, cost.activation_bytes)
        return Step(
            step_s, float(np.median(peaks)), float(max(trace.attributes["peak_allocated_bytes"]))
        )


def step_peaks(
    trace: Trace, schedule: Schedule, costs: StageCosts, activation_bytes: float
) -> np.ndarray:
    """Return the most bytes that come and go on any rank in each counted step, (steps,).

    Activations and messages.
    A trace keeps the most of a whole run, which one late message decides; a simulation without
    noise can be compared with the median step. The costs are of the lowered schedule's stages,
    boundaries in bytes; `activation_bytes` is the size of a unit of activations.

    Raises:
        ConfigError: A step lacks an action.
    """
    counted = trace.steps["step"][trace.steps["is_warmup"] == 0]
    events = trace.events[np.isin(trace.events["step"], counted)]
    pipelines = 1 + int(events["rank"].max(initial=0)) // schedule.num_ranks

    def peak(step: int) -> float:
        step_events = events[events["step"] == step]
        times = [_as_simulation(step_events, schedule, replica) for replica in range(pipelines)]
        return max(
            rank.peak
            for time_ns in times
            for rank in memory_over_time(schedule, costs, time_ns, activation_bytes)
        )

    return np.array([peak(step) for step in counted])


def _as_simulation(events: np.ndarray, schedule: Schedule, replica: int) -> Simulation:
    """Return the times of one replica's actions in one step, in seconds from its first event."""
    first_ns = events["start_ns"].min()
    starts = []
    ends = []
    for rank, row in enumerate(schedule.rank_schedules):
        rank_events = events[events["rank"] == replica * schedule.num_ranks + rank]
        keys = zip(*(rank_events[column].tolist() for column in EVENT_KEY), strict=True)
        times = dict(
            zip(keys, zip(rank_events["start_ns"], rank_events["end_ns"], strict=True), strict=True)
        )
        missing = [action for action in row if _event_key(action) not in times]
        if missing:
            raise ConfigError("trace", f"rank {rank}", f"lacks {missing[0]}")
        spans = np.array([times[_event_key(action)] for action in row]).reshape(-1, 2) - first_ns
        start, end = (spans * 1e-9).T.tolist()
        starts.append(tuple(start))
        ends.append(tuple(end))
    return Simulation(tuple(starts), tuple(ends), 0.0, (), ())


def _event_key(action: Action) -> tuple[int, ...]:
    segment, micro_batch = (
        -1 if number is None else number for number in (action.segment, action.micro_batch)
    )
    return KINDS.index(action.kind.value), action.stage, segment, action.direction, micro_batch


if __name__ == "__main__":
    sys.exit(main())

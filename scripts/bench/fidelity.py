"""Held-out fidelity: predicted step times and peaks beside runs that no constant was taken from.

Emulated: the links are calibrated by a probe of 8 ranks (`scripts.calibrate`), and 14 other runs of 4 to 16 ranks are
compared with their simulation: schedules, micro-batches, caps, message sizes and replicas. Real: a tiny ResNet on 2
ranks, its layers profiled on this machine; four runs give how much longer compute takes in a run than alone, as a
factor and as host time of each layer and pass (before and after the others, to detect a machine that changes its
speed), and four other runs of other sizes and schedules are compared. A simulation without noise knows nothing of other
tenants of the host, which take a second or two at a time: of a real run the first quartile of its steps counts, and of
three profiles the fastest. The peak of an emulated run is that of its median step too; that of the whole run, which one
late message decides, is shown beside it.

Prints a table on stderr and JSON on stdout, with the median and the worst error; the exit code is 1 above the limits.
The error can be kept beside a calibration: `python -m scripts.calibrate --held-out`. Takes `--part emulated|real`,
`--steps N` and Hydra overrides for every case. Needs an idle machine: it prints how busy it was.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import nnls

from analysis.io.load import load_parts
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.runs.run_plan import plan_run
from gems.schedule.action import Action
from gems.schedule.costs import StageCosts
from gems.schedule.memory import memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.simulation.build import lowered_schedule
from gems.simulation.calibration import Calibration, calibration_of
from gems.simulation.costs import schedule_costs, simulate_step
from gems.simulation.profiled_costs import with_profiled_costs
from gems.trace import KINDS, Trace
from gems.utils.atomic_io import read_json
from scripts.bench.rig import Table, counted_steps_s, finished_run, log, machine, parser
from scripts.calibrate import take_probe

STEP_LIMITS, PEAK_LIMIT = (0.03, 0.08), 0.05  # median and worst of the step's; every peak's
NUM_PROFILES = 3
MORE_STEPS = 10  # of a real run, whose steps are short, for one of an emulated run
EMULATED = [
    "machine=emulated", "data=synthetic", "cost=uniform", "cost.unit_s=0.01", "cost.activation_bytes=1000000",
    "train.warmup_steps=1",
]  # fmt: skip
REAL = [
    "machine=cpu", "data=synthetic", "parallel.partitions=2", "profile=measured", "cost=profile",
    "train.evaluate=false",
    "train.warmup_steps=2",
]  # fmt: skip
EVENT_KEY = ("kind", "stage", "segment", "direction", "micro_batch")


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration, by a name and its overrides."""

    name: str
    words: tuple[str, ...]


def emulated(schedule: str, ranks: int, micro_batches: int, size_bytes: int, *more: str) -> Case:
    """Return an emulated case; `size_bytes` is the message from one stage to the next."""
    words = (
        f"schedule={schedule}", f"parallel.partitions={ranks}", f"parallel.micro_batches={micro_batches}",
        f"cost.boundary_bytes={size_bytes}", *more,
    )  # fmt: skip
    short = " ".join(word.rpartition(".")[2] for word in more)
    return Case(f"{schedule} P={ranks} N={micro_batches} {size_bytes // 1000} kB {short}".rstrip(), words)


def real(schedule: str, side_px: int, micro_batches: int, micro_batch_size: int) -> Case:
    """Return a case of a real run on 2 ranks."""
    words = (
        f"schedule={schedule}", f"data.height_px={side_px}", f"data.width_px={side_px}",
        f"parallel.micro_batches={micro_batches}", f"parallel.micro_batch_size={micro_batch_size}",
    )  # fmt: skip
    return Case(f"{schedule} {side_px} px N={micro_batches} x {micro_batch_size}", words)


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
CALIBRATING_REAL = (real("1f1b", 64, 8, 2), real("gpipe", 96, 4, 2), real("zb_h1", 96, 8, 1), real("1f1b", 144, 4, 2))
HELD_OUT_REAL = (
    real("1f1b", 64, 16, 4),
    real("gems_master", 96, 8, 2),
    real("zb_h1", 128, 8, 1),
    real("gpipe", 128, 4, 2),
)


@dataclass(frozen=True, slots=True)
class Observed:
    """The median (or first quartile) of a run's counted steps, and the most activation bytes of a rank.

    On emulated devices the bytes are all those that come and go, with the buffers of messages, in the median step;
    `most_bytes` are those of the whole run, to which a message that was late once adds its own.
    """

    step_s: float
    peak_bytes: float
    most_bytes: float = math.nan


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate a step of a real run.

    `by_profile` simulates it by its profile alone, `passes` counts it in passes of layers (forward 1, backward 2).
    """

    by_profile: Observed
    passes: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer compute takes in a run than in its profile.

    A factor, and host seconds of each pass of a layer.
    """

    factor: float
    pass_s: float

    def step_s(self, estimate: Estimate) -> float:
        """Return the seconds of a step with this slowdown."""
        return self.factor * estimate.by_profile.step_s + self.pass_s * estimate.passes


@dataclass(frozen=True, slots=True)
class Row:
    """A held-out run beside its prediction; errors are predicted over observed, less 1."""

    part: str
    name: str
    predicted: Observed
    observed: Observed

    @property
    def step_error(self) -> float:
        """Relative error of the step time."""
        return self.predicted.step_s / self.observed.step_s - 1.0

    @property
    def peak_error(self) -> float:
        """Relative error of the peak."""
        return self.predicted.peak_bytes / self.observed.peak_bytes - 1.0

    @property
    def most_error(self) -> float:
        """Relative error of the peak to the most bytes of the run."""
        return self.predicted.peak_bytes / self.observed.most_bytes - 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts and return 1 if the errors are above the limits."""
    options = parser(__doc__, "only")
    options.add_argument("--part", choices=tuple(PARTS), action="append")
    options.add_argument("--steps", type=int, default=4, help="counted steps of a run")
    options.add_argument("overrides", nargs="*")
    given = options.parse_args(argv)
    facts: dict[str, Any] = machine()
    table = Table(
        "case:<52", "predicted ms:>14.1f", "observed ms:>13.1f", "error %:>+9.2f", "peak %:>+8.2f", "of run %:>+10.2f"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:  # profiles are to be of this hour
        for part in given.part or PARTS:
            for row in PARTS[part](given.steps, [f"cache_dir={cache}", *given.overrides], facts, given.only):
                rows.append(row)
                times_ms = 1e3 * row.predicted.step_s, 1e3 * row.observed.step_s
                table.row(row.name, *times_ms, *(100 * e for e in (row.step_error, row.peak_error, row.most_error)))
    answer = summary(rows)
    log(
        f"step: median {answer['median_error']:.1%}, worst {answer['worst_error']:.1%}; "
        f"peak: worst {answer['worst_peak_error']:.1%}; {len(rows)} runs; load at the end {os.getloadavg()[0]:.1f}"
    )
    print(json.dumps({**answer, **facts, "load_at_end": os.getloadavg()[0]}))
    return int(not answer["is_within_limits"])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return median and worst errors, of 1 and without sign, over all rows."""
    steps = [abs(row.step_error) for row in rows]
    median, worst = statistics.median(steps), max(steps)
    peak = max(abs(row.peak_error) for row in rows)
    return {
        "median_error": median, "worst_error": worst, "worst_peak_error": peak,
        "is_within_limits": median <= STEP_LIMITS[0] and worst <= STEP_LIMITS[1] and peak <= PEAK_LIMIT,
        "rows": [
            {
                "part": row.part, "case": row.name, "predicted_s": row.predicted.step_s,
                "observed_s": row.observed.step_s,
                "step_error": row.step_error, "peak_error": row.peak_error, "most_error": row.most_error,
            }
            for row in rows
        ],
    }  # fmt: skip


def emulated_rows(steps: int, overrides: Sequence[str], facts: dict[str, Any], only: str) -> Iterable[Row]:
    """Yield the emulated runs beside what links calibrated by the probe predict for them."""
    found = calibration_of(take_probe("emulated"))
    facts["emulated_machine"] = found.machine()
    for case in (case for case in HELD_OUT_EMULATED if only in case.name):
        spec = compose([*EMULATED, *case.words, f"train.steps={steps + 1}", *overrides])
        yield Row("emulated", case.name, predicted(spec, found), observed(spec))


def real_rows(steps: int, overrides: Sequence[str], facts: dict[str, Any], only: str) -> Iterable[Row]:
    """Yield real runs beside the simulation of their profile, with the slowdown that other runs showed."""
    found = calibration_of(take_probe("real"))
    facts["real_machine"] = found.machine()

    def both(case: Case) -> tuple[Estimate, Observed]:
        spec = compose([*REAL, *case.words, f"train.steps={MORE_STEPS * steps + 2}", *overrides])
        boundaries = list(plan_run(spec).boundaries)  # the same for all profiles
        spec = replace(spec, parallel=replace(spec.parallel, boundaries=boundaries))
        return fastest(spec, found), observed(spec, quantile=0.25)

    cases = [case for case in HELD_OUT_REAL if only in case.name]
    before = [both(case) for case in CALIBRATING_REAL]
    pairs = [both(case) for case in cases]
    after = [both(case) for case in CALIBRATING_REAL]
    slowdown = fit_slowdown([*before, *after])
    facts["real_pace"] = {
        "factor": slowdown.factor, "pass_s": slowdown.pass_s,
        **{
            when: [slowdown.step_s(estimate) / seen.step_s - 1 for estimate, seen in some]
            for when, some in (("before", before), ("after", after))
        },
    }  # fmt: skip
    for case, (estimate, seen) in zip(cases, pairs, strict=True):
        yield Row("real", case.name, replace(estimate.by_profile, step_s=slowdown.step_s(estimate)), seen)


PARTS: dict[str, Callable[[int, Sequence[str], dict[str, Any], str], Iterable[Row]]] = {
    "emulated": emulated_rows, "real": real_rows,
}  # fmt: skip


def fit_slowdown(pairs: Sequence[tuple[Estimate, Observed]]) -> Slowdown:
    """Fit the slowdown to runs, by least squares of relative errors; neither of its parts is below 0."""
    columns = np.array([[each.by_profile.step_s / seen.step_s, each.passes / seen.step_s] for each, seen in pairs])
    factor, pass_s = nnls(columns, np.ones(len(columns)))[0]
    return Slowdown(float(factor), float(pass_s))


def fastest(spec: RunSpec, found: Calibration) -> Estimate:
    """Simulate a run by several profiles of this moment, and return what follows from the fastest."""
    estimates = []
    for _ in range(NUM_PROFILES):
        with tempfile.TemporaryDirectory() as cache:
            estimates.append(predicted(replace(spec, cache_dir=cache), found))
    made = lowered_schedule(spec)
    layers = [end - first for first, end in pairwise(spec.parallel.boundaries or ())]
    share = sum(layers) / spec.parallel.partitions
    cost = replace(spec.cost, forward=share, input_grad=share, weight_grad=share, times=list(map(float, layers)))
    in_passes = simulate(made, schedule_costs(replace(spec, cost=cost), made.placement))
    return Estimate(min(estimates, key=lambda each: each.step_s), in_passes.span)


def predicted(spec: RunSpec, found: Calibration) -> Observed:
    """Simulate the very schedule that the ranks run on a machine with the calibrated links.

    Without noise, since the median step is compared. A search may find another schedule for other links: the one for
    the run's own is simulated.
    """
    spec = with_profiled_costs(spec)
    made, cost = lowered_schedule(spec), spec.cost
    values = {key: value for key, value in found.machine().items() if key != "noise"}
    spec = replace(spec, machine=replace(spec.machine, **values))
    simulated = simulate_step(spec, made)[1]
    if spec.machine.kind == "emulated":
        costs = schedule_costs(spec, made.placement)
        memory = memory_over_time(made, costs, simulated, cost.activation_bytes, cost.param_bytes)
        peak = max(rank.peak - rank.parameters for rank in memory)
    else:
        peak = max(simulated.peak) * cost.activation_bytes
    return Observed(simulated.span * cost.unit_s, peak)


def observed(spec: RunSpec, quantile: float = 0.5) -> Observed:
    """Run the configuration on this machine and read its trace; `quantile` of its counted steps counts."""
    with finished_run(spec) as folder:
        step_s = float(np.quantile(counted_steps_s(folder), quantile))
        if spec.machine.kind != "emulated":
            most = float(max(read_json(folder.result_json)["peak_activation_bytes"]))
            return Observed(step_s, most, most)
        trace, made, cost = load_parts(folder.path).trace, folder.read_schedule(), spec.cost
        costs = schedule_costs(with_profiled_costs(spec), made.placement)
        peaks = step_peaks(trace, made, costs, cost.unit_s, cost.activation_bytes)
        return Observed(step_s, float(np.median(peaks)), float(max(trace.attributes["peak_allocated_bytes"])))


def step_peaks(
    trace: Trace, schedule: Schedule, costs: StageCosts, unit_s: float, activation_bytes: float
) -> np.ndarray:
    """Return the most bytes that come and go on any rank in each counted step, (steps,): activations and messages.

    A trace keeps the most of a whole run, which one late message decides; a simulation without noise can be compared
    with the median step.

    Args:
        trace: of an emulated or simulated run, with the events of every action.
        schedule: the lowered one that it ran.
        costs: of its stages, boundaries in bytes.
        unit_s: seconds of a unit of the costs.
        activation_bytes: bytes of a unit of activations.

    Raises:
        ConfigError: a step lacks an action.
    """
    counted = trace.steps["step"][trace.steps["is_warmup"] == 0]
    events = trace.events[np.isin(trace.events["step"], counted)]
    pipelines = 1 + int(events["rank"].max(initial=0)) // schedule.num_ranks
    found = np.zeros((len(counted), pipelines))
    for number, step in enumerate(counted):
        of_step = events[events["step"] == step]
        for replica in range(pipelines):
            times = _as_simulation(of_step, schedule, replica, unit_s)
            found[number, replica] = max(
                rank.peak for rank in memory_over_time(schedule, costs, times, activation_bytes)
            )
    peaks: np.ndarray = found.max(axis=1)
    return peaks


def _as_simulation(events: np.ndarray, schedule: Schedule, replica: int, unit_s: float) -> Simulation:
    """Return the times of one replica's actions in one step, in units from its first event."""
    first_ns = events["start_ns"].min()
    starts, ends = [], []
    for rank, row in enumerate(schedule.rows):
        mine = events[events["rank"] == replica * schedule.num_ranks + rank]
        keys = zip(*(mine[column].tolist() for column in EVENT_KEY), strict=True)
        spans = zip(mine["start_ns"] - first_ns, mine["end_ns"] - first_ns, strict=True)
        times = dict(zip(keys, spans, strict=True))
        found = [times.get(_event_key(action)) for action in row]
        if None in found:
            raise ConfigError("trace", f"rank {rank}", f"lacks {row[found.index(None)]}")
        start_ns, end_ns = zip(*filter(None, found), strict=True)
        starts.append(tuple(float(time) * 1e-9 / unit_s for time in start_ns))
        ends.append(tuple(float(time) * 1e-9 / unit_s for time in end_ns))
    return Simulation(tuple(starts), tuple(ends), 0.0, (), ())


def _event_key(action: Action) -> tuple[int, ...]:
    segment, micro_batch = (-1 if number is None else number for number in (action.segment, action.micro_batch))
    return KINDS.index(action.kind.value), action.stage, segment, action.direction, micro_batch


if __name__ == "__main__":
    sys.exit(main())

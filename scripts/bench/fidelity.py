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

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from analysis.io.load import load_parts
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
from scripts.bench.rig import Table, answered, composed, counted_steps_s, finished_run, log, machine, options, square
from scripts.calibrate import take_probe

STEP_LIMITS, PEAK_LIMIT = (0.03, 0.08), 0.05  # median and worst of the step's; every peak's
NUM_PROFILES = 3
MORE_STEPS = 10  # of a real run, whose steps are short, for one of an emulated run
EMULATED = (
    "machine=emulated data=synthetic cost=uniform cost.unit_s=0.01 cost.activation_bytes=1000000 benchmark.skip_steps=1"
)
REAL = (
    "machine=cpu data=synthetic parallel.partitions=2 profile=measured cost=profile train.evaluate=false "
    "benchmark.skip_steps=2"
)
EVENT_KEY = ("kind", "stage", "segment", "direction", "micro_batch")
PARTS = ("emulated", "real")
Case = tuple[str, str]  # its name and its overrides


def emulated(schedule: str, ranks: int, micro_batches: int, size_bytes: int, more: str = "") -> Case:
    """Return an emulated case; `size_bytes` is the message from one stage to the next."""
    words = (
        f"schedule={schedule} parallel.partitions={ranks} parallel.micro_batches={micro_batches} "
        f"cost.boundary_bytes={size_bytes} {more}"
    )
    return f"{schedule} P={ranks} N={micro_batches} {size_bytes // 1000} kB {more.rpartition('.')[2]}".rstrip(), words


def real(schedule: str, side_px: int, micro_batches: int, micro_batch_size: int) -> Case:
    """Return a case of a real run on 2 ranks."""
    words = f"parallel.micro_batches={micro_batches} parallel.micro_batch_size={micro_batch_size}"
    name = f"{schedule} {side_px} px N={micro_batches} x {micro_batch_size}"
    return name, f"schedule={schedule} {square(side_px)} {words}"


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
    real("1f1b", 64, 16, 4), real("gems_master", 96, 8, 2), real("zb_h1", 128, 8, 1), real("gpipe", 128, 4, 2)
)  # fmt: skip


class Step(NamedTuple):
    """The median (or first quartile) of a run's counted steps, and the most activation bytes of a rank.

    On emulated devices the bytes are all those that come and go, with the buffers of messages, in the median step;
    `most_bytes` are those of the whole run, to which a message that was late once adds its own.
    """

    step_s: float
    peak_bytes: float
    most_bytes: float = math.nan


Pair = tuple[Step, float, Step]  # a run by its profile alone, the passes of layers in a step of it, and as observed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts and return 1 if the errors are above the limits."""
    part, overrides = {"choices": PARTS, "action": "append"}, {"nargs": "*"}
    given = options(__doc__, argv, only="", part=part, steps=4, overrides=overrides)
    facts: dict[str, Any] = machine()
    table = Table(
        "case:<52", "predicted ms=predicted_s:>14.1f", "observed ms=observed_s:>13.1f", "error %=step_error:>+9.2f",
        "peak %=peak_error:>+8.2f", "of run %=most_error:>+10.2f",
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:  # profiles are to be of this hour
        for part in given.part or PARTS:
            measure = emulated_rows if part == "emulated" else real_rows
            rows += table.rows(measure(given.steps, [f"cache_dir={cache}", *given.overrides], facts, given.only))
    answer = summary(rows)
    log(
        f"step: median {answer['median_error']:.1%}, worst {answer['worst_error']:.1%}; "
        f"peak: worst {answer['worst_peak_error']:.1%}; {len(rows)} runs; load at the end {os.getloadavg()[0]:.1f}"
    )
    return answered({**answer, **facts, "load_at_end": os.getloadavg()[0]}, not answer["is_within_limits"])


def compared(part: str, name: str, predicted: Step, seen: Step) -> dict[str, Any]:
    """Return a held-out run beside its prediction; errors are predicted over observed, less 1."""
    return {
        "part": part, "case": name, "predicted_s": predicted.step_s, "observed_s": seen.step_s,
        "step_error": predicted.step_s / seen.step_s - 1.0, "peak_error": predicted.peak_bytes / seen.peak_bytes - 1.0,
        "most_error": predicted.peak_bytes / seen.most_bytes - 1.0,
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median and worst errors, of 1 and without sign, over all rows."""
    steps = [abs(row["step_error"]) for row in rows]
    median, worst = statistics.median(steps), max(steps)
    peak = max(abs(row["peak_error"]) for row in rows)
    return {
        "median_error": median, "worst_error": worst, "worst_peak_error": peak,
        "is_within_limits": median <= STEP_LIMITS[0] and worst <= STEP_LIMITS[1] and peak <= PEAK_LIMIT, "rows": rows,
    }  # fmt: skip


def emulated_rows(steps: int, overrides: list[str], facts: dict[str, Any], only: str) -> Iterator[dict[str, Any]]:
    """Yield the emulated runs beside what links calibrated by the probe predict for them."""
    links = calibration_of(take_probe("emulated"))
    facts["emulated_machine"] = links.machine()
    for name, words in HELD_OUT_EMULATED:
        if only in name:
            spec = composed(EMULATED, words, f"train.steps={steps + 1}", overrides)
            yield compared("emulated", name, predicted(spec, links), observed(spec))


def real_rows(steps: int, overrides: list[str], facts: dict[str, Any], only: str) -> Iterator[dict[str, Any]]:
    """Yield real runs beside the simulation of their profile, with the slowdown that other runs showed."""
    links = calibration_of(take_probe("real"))
    facts["real_machine"] = links.machine()

    def both(case: Case) -> Pair:
        spec = composed(REAL, case[1], f"train.steps={MORE_STEPS * steps + 2}", overrides)
        boundaries = list(plan_run(spec).boundaries)  # the same for all profiles
        spec = replace(spec, parallel=replace(spec.parallel, boundaries=boundaries))
        return *by_profile(spec, links), observed(spec, quantile=0.25)

    cases = [case for case in HELD_OUT_REAL if only in case[0]]
    before, pairs, after = (list(map(both, each)) for each in (CALIBRATING_REAL, cases, CALIBRATING_REAL))
    slowdown = fit_slowdown([*before, *after])
    facts["real_pace"] = slowdown._asdict() | {
        when: [slowdown.step_s(alone, passes) / seen.step_s - 1 for alone, passes, seen in some]
        for when, some in (("before", before), ("after", after))
    }
    for (name, _), (alone, passes, seen) in zip(cases, pairs, strict=True):
        yield compared("real", name, alone._replace(step_s=slowdown.step_s(alone, passes)), seen)


class Slowdown(NamedTuple):
    """How much longer compute takes in a run than in its profile: a factor, and host seconds of each layer's pass."""

    factor: float
    pass_s: float

    def step_s(self, alone: Step, passes: float) -> float:
        """Return the time of a step in a run."""
        return self.factor * alone.step_s + self.pass_s * passes


def fit_slowdown(pairs: Sequence[Pair]) -> Slowdown:
    """Fit the slowdown that runs show.

    By least squares of relative errors; neither is below 0.
    """
    columns = np.array([[alone.step_s / seen.step_s, passes / seen.step_s] for alone, passes, seen in pairs])
    factor, pass_s = nnls(columns, np.ones(len(columns)))[0]
    return Slowdown(float(factor), float(pass_s))


def by_profile(spec: RunSpec, links: Calibration) -> tuple[Step, float]:
    """Return the fastest simulation by several profiles of this moment, and the passes of layers in a step of it.

    A forward is a pass, a backward two.
    """
    steps = []
    for _ in range(NUM_PROFILES):
        with tempfile.TemporaryDirectory() as cache:
            steps.append(predicted(replace(spec, cache_dir=cache), links))
    made = lowered_schedule(spec)
    layers = [end - first for first, end in pairwise(spec.parallel.boundaries or ())]
    share = sum(layers) / spec.parallel.partitions
    cost = replace(spec.cost, forward=share, input_grad=share, weight_grad=share, times=list(map(float, layers)))
    passes = simulate(made, schedule_costs(replace(spec, cost=cost), made.placement)).span
    return min(steps), passes


def predicted(spec: RunSpec, links: Calibration) -> Step:
    """Simulate the very schedule that the ranks run on a machine with the calibrated links.

    Without noise, since the median step is compared. A search may find another schedule for other links: the one for
    the run's own is simulated.
    """
    spec = with_profiled_costs(spec)
    made, cost = lowered_schedule(spec), spec.cost
    values = {key: value for key, value in links.machine().items() if key != "noise"}
    spec = replace(spec, machine=replace(spec.machine, **values))
    simulated = simulate_step(spec, made)[1]
    if spec.machine.kind == "emulated":
        costs = schedule_costs(spec, made.placement)
        memory = memory_over_time(made, costs, simulated, cost.activation_bytes, cost.param_bytes)
        peak = max(rank.peak - rank.parameters for rank in memory)
    else:
        peak = max(simulated.peak) * cost.activation_bytes
    return Step(simulated.span * cost.unit_s, peak)


def observed(spec: RunSpec, quantile: float = 0.5) -> Step:
    """Run the configuration on this machine and read its trace; `quantile` of its counted steps counts."""
    with finished_run(spec) as folder:
        step_s = float(np.quantile(counted_steps_s(folder), quantile))
        if spec.machine.kind != "emulated":
            most = float(max(read_json(folder.result_json)["peak_activation_bytes"]))
            return Step(step_s, most, most)
        trace, made, cost = load_parts(folder.path).trace, folder.read_schedule(), spec.cost
        costs = schedule_costs(with_profiled_costs(spec), made.placement)
        peaks = step_peaks(trace, made, costs, cost.unit_s, cost.activation_bytes)
        return Step(step_s, float(np.median(peaks)), float(max(trace.attributes["peak_allocated_bytes"])))


def step_peaks(
    trace: Trace, schedule: Schedule, costs: StageCosts, unit_s: float, activation_bytes: float
) -> np.ndarray:
    """Return the most bytes that come and go on any rank in each counted step, (steps,): activations and messages.

    A trace keeps the most of a whole run, which one late message decides; a simulation without noise can be compared
    with the median step. The costs are of the lowered schedule's stages, boundaries in bytes; `unit_s` is seconds of
    their unit, `activation_bytes` bytes of a unit of activations.

    Raises:
        ConfigError: a step lacks an action.
    """
    counted = trace.steps["step"][trace.steps["is_warmup"] == 0]
    events = trace.events[np.isin(trace.events["step"], counted)]
    pipelines = 1 + int(events["rank"].max(initial=0)) // schedule.num_ranks

    def peak(step: int) -> float:
        mine = events[events["step"] == step]
        times = [_as_simulation(mine, schedule, replica, unit_s) for replica in range(pipelines)]
        return max(rank.peak for each in times for rank in memory_over_time(schedule, costs, each, activation_bytes))

    return np.array([peak(step) for step in counted])


def _as_simulation(events: np.ndarray, schedule: Schedule, replica: int, unit_s: float) -> Simulation:
    """Return the times of one replica's actions in one step, in units from its first event."""
    first_ns = events["start_ns"].min()
    starts, ends = [], []
    for rank, row in enumerate(schedule.rows):
        mine = events[events["rank"] == replica * schedule.num_ranks + rank]
        keys = zip(*(mine[column].tolist() for column in EVENT_KEY), strict=True)
        times = dict(zip(keys, zip(mine["start_ns"], mine["end_ns"], strict=True), strict=True))
        missing = [action for action in row if _event_key(action) not in times]
        if missing:
            raise ConfigError("trace", f"rank {rank}", f"lacks {missing[0]}")
        spans = np.array([times[_event_key(action)] for action in row]).reshape(-1, 2) - first_ns
        start, end = (spans * 1e-9 / unit_s).T.tolist()
        starts.append(tuple(start))
        ends.append(tuple(end))
    return Simulation(tuple(starts), tuple(ends), 0.0, (), ())


def _event_key(action: Action) -> tuple[int, ...]:
    segment, micro_batch = (-1 if number is None else number for number in (action.segment, action.micro_batch))
    return KINDS.index(action.kind.value), action.stage, segment, action.direction, micro_batch


if __name__ == "__main__":
    sys.exit(main())

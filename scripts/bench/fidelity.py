"""Held-out fidelity: predicted step times and peaks beside runs that no constant was taken from.

Emulated: the links are calibrated by a probe of 8 ranks (`scripts.calibrate`), and 14 other runs of 4 to 16 ranks are
compared with their simulation: schedules, micro-batches, caps, message sizes and replicas. Real: a tiny ResNet on 2 ranks,
its layers profiled on this machine; four runs give how much longer compute takes in a run than alone, as a factor and as host
time of each layer and pass (before and after the others, so that a machine that changes its speed is seen), and four other runs
of other sizes and schedules are compared.
What other tenants of the host take, for a second or two at a time, is nothing that a simulation without noise knows: of a
real run the first quartile of its steps counts, and of three profiles the fastest. The peak of an emulated run is that of its
median step too (`scripts.bench.step_peaks`); that of the whole run, which one late message decides, stands beside it.

Prints a table on stderr and JSON on stdout, with the median and the worst error; exits with 1 above the limits. The error
can be kept beside a calibration: `python -m scripts.calibrate --held-out`. Takes `--part emulated|real`, `--steps N` and
Hydra overrides for every case. Wants a machine on which nothing else runs: it says how busy it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import nnls

from gems.config.schema import RunSpec
from gems.simulation.calibration import Calibration, calibration_of
from scripts.bench.fidelity_cases import CALIBRATING_REAL, EMULATED, HELD_OUT_EMULATED, HELD_OUT_REAL, REAL, Case
from scripts.calibrate import take_probe

STEP_LIMITS, PEAK_LIMIT = (0.03, 0.08), 0.05  # median and worst of the step's; every peak's
RUN_LIMIT_S = 550.0
NUM_PROFILES = 3
MORE_STEPS = 10  # of a real run, whose steps are short, for one of an emulated run
PARTS = ("emulated", "real")


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run showed: the median (or first quartile) of its counted steps, and the most activation bytes of a rank.

    On emulated devices the bytes are those of all that comes and goes, with the buffers of messages, and again those of the
    median step; `most_bytes` are those of the whole run, where a message that was late once adds its own.
    """

    step_s: float
    peak_bytes: float
    most_bytes: float = math.nan


@dataclass(frozen=True, slots=True)
class Guess:
    """A simulated step of a real run, by its profile alone, and the same step in passes of layers: a forward is 1, a backward 2."""

    by_profile: Observed
    passes: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How much longer compute takes in a run than in its profile: a factor, and seconds of the host for each pass of a layer."""

    factor: float
    pass_s: float

    def step_s(self, guess: Guess) -> float:
        """Return the seconds of a step at this pace."""
        return self.factor * guess.by_profile.step_s + self.pass_s * guess.passes


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
    """Run the chosen parts and gives 1 where the errors are above the limits."""
    parser = argparse.ArgumentParser(prog="scripts.bench.fidelity")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--only", metavar="WORD", help="the cases whose name has the word")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a run")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    print(f"load of this machine at the start: {load:.1f} (0 is quiet)", file=sys.stderr)
    print(
        f"{'case':<52}{'predicted ms':>14}{'observed ms':>13}{'error %':>9}{'peak %':>8}{'of run %':>10}",
        file=sys.stderr,
    )
    rows: list[Row] = []
    facts: dict[str, Any] = {"load_at_start": load, "cores": os.cpu_count()}
    cache = tempfile.TemporaryDirectory()  # profiles are to be of this hour
    overrides = [f"cache_dir={cache.name}", *options.overrides]
    for part in options.part or PARTS:
        held_out = of_emulated if part == "emulated" else of_real
        for row in held_out(options.steps, overrides, facts, options.only or ""):
            rows.append(row)
            print(
                f"{row.name:<52}{row.predicted.step_s * 1e3:>14.1f}{row.observed.step_s * 1e3:>13.1f}"
                f"{row.step_error * 100:>+9.2f}{row.peak_error * 100:>+8.2f}{row.most_error * 100:>+10.2f}",
                file=sys.stderr,
            )
    cache.cleanup()
    answer = summary(rows)
    print(
        f"step: median {answer['median_error']:.1%}, worst {answer['worst_error']:.1%}; "
        f"peak: worst {answer['worst_peak_error']:.1%}; {len(rows)} runs; load at the end {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
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
                "part": row.part, "case": row.name, "predicted_s": row.predicted.step_s, "observed_s": row.observed.step_s,
                "step_error": row.step_error, "peak_error": row.peak_error,
                "most_error": row.most_error,
            }
            for row in rows
        ],
    }  # fmt: skip


def of_emulated(steps: int, overrides: Sequence[str], facts: dict[str, Any], only: str = "") -> Iterable[Row]:
    """Yield the emulated runs beside what links calibrated by the probe predict for them."""
    from gems.config.compose import compose

    found = calibration_of(take_probe("emulated"))
    facts["emulated_machine"] = found.machine()
    for case in (case for case in HELD_OUT_EMULATED if only in case.name):
        spec = compose([*EMULATED, *case.words, f"train.steps={steps + 1}", *overrides])
        yield Row("emulated", case.name, predicted(spec, found), observed(spec))


def of_real(steps: int, overrides: Sequence[str], facts: dict[str, Any], only: str = "") -> Iterable[Row]:
    """Yield real runs beside the simulation of their profile, with the pace that other runs showed."""
    from gems.config.compose import compose
    from gems.runs.run_plan import plan_run

    found = calibration_of(take_probe("real"))
    facts["real_machine"] = found.machine()

    def both(case: Case) -> tuple[Guess, Observed]:
        spec = compose([*REAL, *case.words, f"train.steps={MORE_STEPS * steps + 2}", *overrides])
        cut = list(plan_run(spec).boundaries)  # the same for all profiles
        spec = replace(spec, parallel=replace(spec.parallel, boundaries=cut))
        return fastest(spec, found), observed(spec, quantile=0.25)

    cases = [case for case in HELD_OUT_REAL if only in case.name]
    before = [both(case) for case in CALIBRATING_REAL]
    pairs = [both(case) for case in cases]
    after = [both(case) for case in CALIBRATING_REAL]
    pace = pace_of([*before, *after])
    facts["real_pace"] = {
        "factor": pace.factor, "pass_s": pace.pass_s,
        **{when: [pace.step_s(guess) / seen.step_s - 1 for guess, seen in some] for when, some in (("before", before), ("after", after))},
    }  # fmt: skip
    for case, (guess, seen) in zip(cases, pairs, strict=True):
        yield Row("real", case.name, replace(guess.by_profile, step_s=pace.step_s(guess)), seen)


def pace_of(pairs: Sequence[tuple[Guess, Observed]]) -> Pace:
    """Fit the pace to runs, by least squares of relative errors; neither of its parts is below 0."""
    columns = np.array([[guess.by_profile.step_s / seen.step_s, guess.passes / seen.step_s] for guess, seen in pairs])
    factor, pass_s = nnls(columns, np.ones(len(columns)))[0]
    return Pace(float(factor), float(pass_s))


def fastest(spec: RunSpec, found: Calibration) -> Guess:
    """Simulate a run by several profiles of this moment, and gives what follows from the fastest."""
    from gems.schedule.simulate import simulate
    from gems.simulation.build import lowered_schedule
    from gems.simulation.costs import schedule_costs

    guesses = []
    for _ in range(NUM_PROFILES):
        with tempfile.TemporaryDirectory() as cache:
            guesses.append(predicted(replace(spec, cache_dir=cache), found))
    made = lowered_schedule(spec)
    layers = [end - first for first, end in pairwise(spec.parallel.boundaries or ())]
    share = sum(layers) / spec.parallel.partitions
    cost = replace(spec.cost, forward=share, input_grad=share, weight_grad=share, times=list(map(float, layers)))
    in_passes = simulate(made, schedule_costs(replace(spec, cost=cost), made.placement))
    return Guess(min(guesses, key=lambda guess: guess.step_s), in_passes.span)


def predicted(spec: RunSpec, found: Calibration) -> Observed:
    """Simulate the very list that the ranks run on a machine with the calibrated links.

    Without noise, since it is the median step that is compared. A search may find another list for other links: it is the one for
    the run's own that is played.
    """
    from gems.schedule.memory import memory_over_time
    from gems.simulation.build import lowered_schedule
    from gems.simulation.costs import schedule_costs, simulate_step
    from gems.simulation.profiled_costs import with_profiled_costs

    spec = with_profiled_costs(spec)
    made, cost = lowered_schedule(spec), spec.cost
    values = {key: value for key, value in found.machine().items() if key != "noise"}
    spec = replace(spec, machine=replace(spec.machine, **values))
    played = simulate_step(spec, made)[1]
    if spec.machine.kind == "emulated":
        memory = memory_over_time(
            made, schedule_costs(spec, made.placement), played, cost.activation_bytes, cost.param_bytes
        )
        peak = max(rank.peak - rank.parameters for rank in memory)
    else:
        peak = max(played.peak) * cost.activation_bytes
    return Observed(played.span * cost.unit_s, peak)


def observed(spec: RunSpec, quantile: float = 0.5) -> Observed:
    """Run the configuration on this machine and reads its trace; `quantile` of its counted steps counts."""
    from analysis.io.load import load_parts
    from analysis.metrics.run_metrics import step_times_s
    from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
    from gems.runs.prepare import prepare
    from gems.simulation.costs import schedule_costs
    from gems.utils.atomic_io import read_json
    from scripts.bench.step_peaks import step_peaks

    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(spec, runs_dir=scratch))
        argv = mpiexec_argv(spec.world_size, [sys.executable, "-m", "gems.engine.run", str(folder.path)])
        ended = run_ranks(argv, rank_environment(1), folder.logs / "ranks.log", timeout_s=RUN_LIMIT_S, echo=False)
        if ended.returncode:
            raise SystemExit("\n".join(ended.tail))
        trace = load_parts(folder.path).trace
        counted = step_times_s(trace.steps)[trace.steps["is_warmup"] == 0]
        step_s = float(np.quantile(counted, quantile))
        if spec.machine.kind != "emulated":
            most = float(max(read_json(folder.result_json)["peak_activation_bytes"]))
            return Observed(step_s, most, most)
        made, run = folder.read_schedule(), folder.read_run()
        costs = schedule_costs(run, made.placement)
        peaks = step_peaks(trace, made, costs, run.cost.unit_s, run.cost.activation_bytes)
        most = float(max(trace.attributes["peak_allocated_bytes"]))
        return Observed(step_s, float(np.median(peaks)), most)


if __name__ == "__main__":
    sys.exit(main())

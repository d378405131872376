"""The pace of this machine: real steps of two ranks beside the simulation of their layers.

A tiny ResNet on 2 ranks in four configurations tells how much longer layers take in a run, as a
factor and as host time of each layer and pass. Of the steps of a run the first quartile counts, and
of three profiles the fastest: other tenants of the host take a second or two at a time.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gems.config.schema import RunSpec
from gems.plan.draft import Draft
from gems.plan.evaluate import evaluate
from gems.profile.pace import RunPace
from gems.schedule.memory import memory_over_time
from gems.schedule.simulate import simulate
from gems.simulation.calibration import Calibration, fit_pace
from gems.simulation.costs import RunCosts
from gems.utils.atomic_io import read_json
from scripts.bench.rig import composed, counted_steps_s, finished_run, square

NUM_PROFILES = 3
SKIPPED_STEPS = 2
REAL = (
    "machine=cpu data=synthetic parallel.partitions=2 profile=measured cost=profile"
    f" train.evaluate=false benchmark.skip_steps={SKIPPED_STEPS}"
)
Case = tuple[str, str]  # its name and its overrides


def real(schedule: str, side_px: int, micro_batches: int, micro_batch_size: int) -> Case:
    """Return a case of a real run on 2 ranks."""
    words = f"parallel.micro_batches={micro_batches} parallel.micro_batch_size={micro_batch_size}"
    name = f"{schedule} {side_px} px N={micro_batches} x {micro_batch_size}"
    return name, f"schedule={schedule} {square(side_px)} {words}"


CALIBRATING = (
    real("1f1b", 64, 8, 2),
    real("gpipe", 96, 4, 2),
    real("zb_h1", 96, 8, 1),
    real("1f1b", 144, 4, 2),
)


class Step(NamedTuple):
    """The median (or first quartile) of a run's counted steps, and its peak activation bytes.

    On emulated devices the bytes are all those that come and go, with the buffers of messages, in
    the median step; `most_bytes` are those of the whole run, to which a message that was late once
    adds its own.
    """

    step_s: float
    peak_bytes: float
    most_bytes: float = math.nan


class Pair(NamedTuple):
    """A step by its layers alone, the passes of layers in it, and the step as observed."""

    alone: Step
    passes: float
    seen: Step


def real_run(case: Case, steps: int, overrides: Sequence[str]) -> RunSpec:
    """Return the run of a case by the costs of its layers alone, and with a fixed partition."""
    spec = composed(REAL, case[1], f"train.steps={steps + SKIPPED_STEPS}", overrides)
    spec = replace(spec, machine=replace(spec.machine, pace_factor=None))
    return replace(
        spec, parallel=replace(spec.parallel, boundaries=list(evaluate(spec).boundaries))
    )


def paired(case: Case, links: Calibration, steps: int, overrides: Sequence[str]) -> Pair:
    """Run a case, and simulate it by several profiles of this moment."""
    spec = real_run(case, steps, overrides)
    return Pair(fastest(spec, links), passes_of(spec), observed(spec))


def pace_of(pairs: Sequence[Pair]) -> RunPace:
    """Fit the pace that some runs show."""
    alone, passes, seen = zip(*pairs, strict=True)
    return fit_pace([step.step_s for step in alone], passes, [step.step_s for step in seen])


def take_pace(links: Calibration, steps: int, overrides: Sequence[str] = ()) -> RunPace:
    """Run the calibrating cases on this machine and fit its pace."""
    with tempfile.TemporaryDirectory() as cache:  # profiles are to be of this hour, and alone
        return pace_of(
            [paired(case, links, steps, [f"cache_dir={cache}", *overrides]) for case in CALIBRATING]
        )


def fastest(spec: RunSpec, links: Calibration) -> Step:
    """Return the fastest simulation of a run by several profiles of this moment."""
    steps = []
    for _ in range(NUM_PROFILES):
        with tempfile.TemporaryDirectory() as cache:
            steps.append(predicted(replace(spec, cache_dir=cache), links))
    return min(steps)


def passes_of(spec: RunSpec) -> float:
    """Return the passes of layers in a step of a run, on its critical path.

    A forward is a pass, a backward two.
    """
    schedule = Draft(spec).lowered
    layers = [end - first for first, end in pairwise(spec.parallel.boundaries or ())]
    share = sum(layers) / spec.parallel.partitions
    cost = replace(
        spec.cost,
        forward=share,
        input_grad=share,
        weight_grad=share,
        times=list(map(float, layers)),
    )
    return simulate(schedule, RunCosts.of(replace(spec, cost=cost)).stages(schedule.placement)).span


def predicted(spec: RunSpec, links: Calibration) -> Step:
    """Simulate the very schedule that the ranks run on a machine with the calibrated links.

    Without noise, since the median step is compared. A search may find another schedule for other
    links: the one for the run's own is simulated.
    """
    spec = replace(spec, cost=Draft(spec).costs.cost)
    schedule = Draft(spec).lowered
    cost = spec.cost
    values = {key: value for key, value in links.machine().items() if key != "noise"}
    spec = replace(spec, machine=replace(spec.machine, **values))
    run_costs = RunCosts.of(spec)
    simulated = run_costs.kept(schedule).simulation
    if spec.machine.is_emulated:
        stages = run_costs.stages(schedule.placement)
        memory = memory_over_time(
            schedule, stages, simulated, cost.activation_bytes, cost.param_bytes
        )
        peak = max(rank.peak - rank.parameters for rank in memory)
    else:
        peak = max(simulated.peak) * cost.activation_bytes
    return Step(simulated.span, peak)


def observed(spec: RunSpec) -> Step:
    """Run a real configuration on this machine; the first quartile of its counted steps counts."""
    with finished_run(spec) as folder:
        step_s = float(np.quantile(counted_steps_s(folder), 0.25))
        most = float(max(read_json(folder.result_json)["peak_activation_bytes"]))
        return Step(step_s, most, most)

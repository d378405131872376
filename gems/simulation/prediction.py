"""The prediction of one step of a run by simulation: times, efficiency, memory and bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gems.config.schema import RunSpec
from gems.memory.case import PlanOutcome
from gems.memory.timeline import RankTimeline
from gems.profile.subject import Subject
from gems.schedule.action import Kind
from gems.schedule.bounds import memory_time_bound
from gems.schedule.costs import Network, StageCosts
from gems.schedule.memory import Held, RankMemory, memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import RankTime, Simulation, rank_times
from gems.simulation.calibration import Confidence, confidence_of, launch_words
from gems.simulation.costs import RunCosts, counts_units, is_by_layers
from gems.simulation.jitter import median_step, noisy_steps, span_interval

# The name of a rank's times in the JSON, and in `RankTime`.
TIMES = {
    "useful": "useful",
    "recompute": "recompute",
    "link_wait": "link",
    "input_wait": "input",
    "reduce": "reduce",
    "optimizer": "step",
    "idle": "idle",
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One simulated step of a run, in seconds, and the inputs of the simulation.

    Attributes:
        run: the run with the costs of the simulation.
        bounds: the largest efficiency in the run's number of strips, and, for a search, in any
        number of strips.
        step: the simulated step; with machine.noise, the median of drawn steps.
        interval: the spans between which 95 % of the drawn steps lie; without noise, the step's
        span twice.
        unit_s: seconds in a unit of the configured time.
        activation_bytes: bytes in a unit of memory; 0 if unknown.
    """

    run: RunSpec
    schedule: Schedule
    costs: StageCosts
    network: Network
    cap: float | None
    step: Simulation
    times: tuple[RankTime, ...]
    memory: tuple[RankMemory, ...]
    bounds: tuple[float, float | None]
    interval: tuple[float, float]
    unit_s: float
    activation_bytes: int

    @property
    def bound(self) -> float:
        """The largest efficiency in the run's number of strips."""
        return self.bounds[0]

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.step.span

    @property
    def confidence(self) -> Confidence | None:
        """The confidence in the step time on a real machine.

        It is None if the costs are not those of the run's layers.
        """
        run = self.run
        is_real = run.machine.is_real
        return (
            confidence_of(Subject.of(run))
            if is_real and is_by_layers(run.cost, run.memory)
            else None
        )

    @property
    def launch_costs(self) -> str | None:
        """The launch costs behind the step, in words; None if it has none."""
        return None if self.confidence is None else launch_words(Subject.of(self.run))

    @property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """The most bytes that each rank of a pipeline holds on its device; None if unknown."""
        return tuple(rank.peak for rank in self.memory) if self.activation_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `gems simulate`.

        Shares are fractions of 1: `efficiency` is useful compute over ranks x step, `bubble` the
        time without compute, `bound` the largest efficiency for this placement under the cap
        (without one, under the schedule's peak; without noise), and `gap` the missed part of the
        bound. For a search, `bound` is for `strips` strips on any placement, and `bound_any_strips`
        for any number of strips with equally fast layers; the latter is otherwise null. Lists have
        one item per rank of a pipeline; replicas are alike. Sizes in bytes are null without
        cost.activation_bytes. `time_unit` is "unit" if costs are configured without cost.unit_s:
        then a unit counts as a second, and `images_per_s` is null. `is_calibrated` and
        `step_range_s` are null if unknown or not applicable.
        """
        confidence = self.confidence
        spec = self.run
        is_in_units = counts_units(spec.cost, spec.memory, spec.machine)
        step = self.step
        num_ranks = self.schedule.num_ranks
        size = self.activation_bytes
        unknown = [None] * num_ranks
        computing = sum(time.useful + time.recompute for time in self.times)
        return {
            "source": "simulated",
            "memory": spec.memory.name,
            "schedule": self.schedule.name,
            "partitions": num_ranks,
            "replicas": spec.parallel.replicas,
            "world_size": spec.world_size,
            "micro_batches": self.schedule.num_whole,
            "strips": self.schedule.num_strips,
            "stages": self.schedule.num_stages,
            "directions": self.schedule.num_directions,
            "step_units": step.span / self.unit_s,
            "step_s": self.step_s,
            "is_calibrated": None if confidence is None else confidence.is_calibrated,
            "step_range_s": None if confidence is None else confidence.range_s(self.step_s),
            "step_low_s": self.interval[0],
            "step_high_s": self.interval[1],
            "time_unit": "unit" if is_in_units else "s",
            "images_per_s": None if is_in_units else spec.parallel.global_batch / self.step_s,
            "efficiency": step.efficiency,
            "bubble": 1.0 - computing / (num_ranks * step.span),
            "bound": self.bound,
            "bound_any_strips": self.bounds[1],
            "gap": 1.0 - step.efficiency / self.bound,
            "cap": self.cap,
            "peak_units": list(step.peak),
            "peak_activation_bytes": [peak * size for peak in step.peak] if size else unknown,
            "peak_bytes": list(self.peak_bytes or unknown),
            "peak_host_bytes": [
                max((point.host for point in memory.held), default=0.0) if size else None
                for memory in self.memory
            ],
            **{
                f"{name}_s": [getattr(time, part) for time in self.times]
                for name, part in TIMES.items()
            },
        }


def predict(
    run: RunSpec,
    costs: RunCosts,
    outcome: PlanOutcome,
    bounds: tuple[float, float | None] | None = None,
) -> Prediction:
    """Simulate a step of a run as planned, with one pipeline for all replicas.

    `run` has the costs of its plan, and `bounds` are the efficiencies that a search has proven.
    Bytes on the device follow from the layers, if known; otherwise they cover only activations,
    messages and parameters.
    """
    schedule = outcome.schedule
    stages = outcome.costs
    network = outcome.network
    unit_s, unit_bytes = (
        (1.0, 1) if outcome.is_segmented else (run.cost.unit_s, run.cost.activation_bytes)
    )
    step, interval = with_jitter(outcome, run.machine.noise, run.seed)
    memory = (
        memory_over_time(schedule, stages, step, unit_bytes, run.cost.param_bytes)
        if outcome.case is None
        else _memory_over_time(outcome.ranks, step)
    )
    cap = outcome.cap
    if bounds is not None:
        cap = costs.cap_bytes if outcome.is_segmented else costs.cap
    else:
        most = max(step.peak) if cap is None and not outcome.is_segmented else cap
        allow = allowed_actions(run.schedule.memory_actions, schedule)
        is_split = schedule.has_split_backward
        bounds = memory_time_bound(stages, schedule.placement, most, is_split, network, allow), None
    return Prediction(
        run,
        schedule,
        stages,
        network,
        cap,
        step,
        rank_times(schedule, stages, step, network, outcome.paces[0]),
        memory,
        bounds,
        interval,
        unit_s,
        unit_bytes,
    )


def with_jitter(
    outcome: PlanOutcome, noise: float, seed: int
) -> tuple[Simulation, tuple[float, float]]:
    """Return the median step under machine.noise, and the interval of 95 % of the steps."""
    quiet = outcome.simulation
    if not noise:
        return quiet, (quiet.span, quiet.span)
    steps = noisy_steps(outcome, noise, seed)
    return median_step(steps), span_interval(steps)


def _memory_over_time(ranks: Iterable[RankTimeline], step: Simulation) -> tuple[RankMemory, ...]:
    """Return each rank's bytes over time: while an action runs, and after it."""
    memory = []
    for timeline, starts, ends in zip(ranks, step.start, step.end, strict=True):
        points = []
        for point, start, end in zip(timeline.points, starts, ends, strict=True):
            activation_bytes = float(point.activation_bytes)
            host = float(point.host_bytes)
            points.append(
                Held(
                    start,
                    activation_bytes,
                    float(point.during_bytes - point.activation_bytes),
                    host,
                )
            )
            points.append(
                Held(
                    end, activation_bytes, float(point.device_bytes - point.activation_bytes), host
                )
            )
        memory.append(RankMemory(0.0, tuple(points)))
    return tuple(memory)


def allowed_actions(memory_actions: Iterable[str], schedule: Schedule) -> tuple[str, ...]:
    """Return the memory actions that the bound allows.

    They are the schedule's own and those that the run lets a search use.
    """
    used = {
        name
        for name, kind in (("recompute", Kind.R), ("offload", Kind.OFFLOAD))
        if schedule.has_any(kind)
    }
    return tuple(sorted(used | set(memory_actions), reverse=True))

"""What one step of a run is predicted to take.

Times, efficiency, memory over time and the bound, by simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.memory.case import PlanOutcome
from gems.memory.plan import MemoryPlan
from gems.memory.timeline import RankTimeline
from gems.models import layers_of
from gems.schedule import CAPPED
from gems.schedule.action import Kind
from gems.schedule.bounds import memory_time_bound
from gems.schedule.costs import Network, StageCosts
from gems.schedule.lower import compute_only
from gems.schedule.memory import Held, RankMemory, memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import RankTime, Simulation, rank_times
from gems.simulation.build import partition_of, search_schedule
from gems.simulation.calibration import Confidence, confidence_of
from gems.simulation.costs import (
    activation_cap,
    counts_units,
    replica_pace,
    schedule_costs,
    simulate_step,
)
from gems.simulation.jitter import interval_of, median_of, noisy_steps
from gems.simulation.memory_case import memory_case
from gems.simulation.model_costs import PROFILE

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
    """One simulated step of a run, in its units, and what it was simulated with.

    Attributes:
        run: with the costs that it was simulated with.
        bounds: the largest efficiency in so many strips, and of a search in any number of them.
        step: with machine.noise, the median of drawn steps.
        interval: the spans between which 95 % of the drawn steps lie; without noise, the step's
            span twice.
        unit_s: seconds in a unit of time.
        activation_bytes: bytes in a unit of memory; 0 if not known.
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
        """The largest efficiency in so many strips."""
        return self.bounds[0]

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.step.span * self.unit_s

    @property
    def confidence(self) -> Confidence | None:
        """How far the step of a real machine can be trusted.

        None if its costs are not those of its layers.
        """
        spec = self.run
        is_by_layers = spec.machine.kind == "real" and (
            spec.cost.name == PROFILE or spec.memory.name != "keep"
        )
        return confidence_of(spec) if is_by_layers else None

    @property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """The most bytes that each rank of a pipeline holds on its device, None if they are not known."""
        return tuple(rank.peak for rank in self.memory) if self.activation_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `gems simulate`.

        Shares (efficiency, bubble, bound, gap) are fractions of 1: useful compute over ranks x
        step, time in which a rank computes nothing, the largest efficiency for this placement under
        the cap (without one, under the peak that the schedule has; times without noise), and the
        part of the bound that is missed. Of schedule=capped `bound` is that of `strips` strips on
        any placement, and `bound_any_strips` that of any number of them, with layers as fast as in
        these; null of others. Lists have an item a rank of one pipeline: replicas are alike. Sizes
        in bytes are null where cost.activation_bytes is not given. `time_unit` is "unit" if costs
        are configured without cost.unit_s: then a unit counts as a second, and `images_per_s` is
        null. `is_calibrated` and `step_range_s` say how far the step's time can be trusted, null
        where that is not known or does not apply.
        """
        confidence = self.confidence
        is_in_units = counts_units(self.run)
        spec = self.run
        step = self.step
        unit_s = self.unit_s
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
            "step_units": step.span,
            "step_s": self.step_s,
            "is_calibrated": None if confidence is None else confidence.is_calibrated,
            "step_range_s": None if confidence is None else confidence.range_s(self.step_s),
            "step_low_s": self.interval[0] * unit_s,
            "step_high_s": self.interval[1] * unit_s,
            "time_unit": "unit" if is_in_units else "s",
            "images_per_s": None if is_in_units else global_batch(spec) / self.step_s,
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
                max((held.host for held in memory.held), default=0.0) if size else None
                for memory in self.memory
            ],
            **{
                f"{name}_s": [getattr(time, part) * unit_s for time in self.times]
                for name, part in TIMES.items()
            },
        }


def predict_schedule(run: RunSpec, schedule: Schedule) -> Prediction:
    """Simulate a lowered schedule that keeps its activations, one pipeline for all replicas.

    Raises:
        DoesNotFitError: a rank would hold more than its device, by the profile of its layers.
    """
    costs = schedule_costs(run, schedule.placement)
    cap = activation_cap(run)
    network, quiet = simulate_step(run, schedule)
    step, interval = with_jitter(run, schedule, costs, network, cap, quiet)
    return Prediction(
        run,
        schedule,
        costs,
        network,
        cap,
        step,
        rank_times(schedule, costs, step, network, replica_pace(run, 0)),
        _kept_memory(run, schedule, costs, step),
        _efficiency_bounds(run, schedule, costs, network, max(step.peak) if cap is None else cap),
        interval,
        run.cost.unit_s,
        run.cost.activation_bytes,
    )


def predict_outcome(run: RunSpec, outcome: PlanOutcome) -> Prediction:
    """Simulate a run under its memory policy, in seconds and bytes.

    The bytes on the device are those of its walk.
    """
    schedule = outcome.schedule
    costs = outcome.costs
    network = outcome.network
    step, interval = with_jitter(run, schedule, costs, network, None, outcome.simulation)
    cap = activation_cap(run) if schedule.name == CAPPED else None
    bounds: tuple[float, float | None]
    if cap is None:
        bounds = (
            memory_time_bound(
                costs, schedule.placement, None, schedule.has_split_backward, network
            ),
            None,
        )
    else:
        bounds = _search_bounds(run)
    return Prediction(
        run,
        schedule,
        costs,
        network,
        None if cap is None else cap * run.cost.activation_bytes,
        step,
        rank_times(schedule, costs, step, network, replica_pace(run, 0)),
        _memory_over_time(outcome.ranks, step),
        bounds,
        interval,
        1.0,
        1,
    )


def with_jitter(
    run: RunSpec,
    schedule: Schedule,
    costs: StageCosts,
    network: Network,
    cap: float | None,
    quiet: Simulation,
) -> tuple[Simulation, tuple[float, float]]:
    """Return the median step under machine.noise, and the times between which 95 % of the steps lie."""
    if not run.machine.noise:
        return quiet, (quiet.span, quiet.span)
    machine = run.machine
    replicas = run.parallel.replicas
    steps = noisy_steps(
        schedule, costs, network, cap, machine.noise, replicas, run.seed, pace=replica_pace(run, 0)
    )
    return median_of(steps), interval_of(steps)


def _kept_memory(
    run: RunSpec, schedule: Schedule, costs: StageCosts, step: Simulation
) -> tuple[RankMemory, ...]:
    """Return the bytes of ranks that keep their activations.

    By the storages of the layers, if a profile names them.
    Configured costs, a placed schedule, and a searched one of more stages than layers count only
    activations, messages and parameters.
    """
    has_profile = run.cost.name == PROFILE and schedule.placement.feeders is None
    if not has_profile or schedule.num_stages > len(layers_of(run.model, run.data)):
        return memory_over_time(
            schedule, costs, step, run.cost.activation_bytes, run.cost.param_bytes
        )
    case = memory_case(run, compute_only(schedule), partition_of(run, schedule).boundaries)
    return _memory_over_time(case.timelines(MemoryPlan.keeping(case.boundaries), schedule), step)


def _memory_over_time(ranks: Iterable[RankTimeline], step: Simulation) -> tuple[RankMemory, ...]:
    """Return each rank's bytes over time: while an action runs, and after it."""
    memory = []
    for timeline, starts, ends in zip(ranks, step.start, step.end, strict=True):
        held = []
        for point, start, end in zip(timeline.points, starts, ends, strict=True):
            kept = float(point.activation_bytes)
            host = float(point.host_bytes)
            held.append(Held(start, kept, float(point.during_bytes - point.activation_bytes), host))
            held.append(Held(end, kept, float(point.device_bytes - point.activation_bytes), host))
        memory.append(RankMemory(0.0, tuple(held)))
    return tuple(memory)


def _efficiency_bounds(
    run: RunSpec, schedule: Schedule, costs: StageCosts, network: Network, cap: float
) -> tuple[float, float | None]:
    """Return the efficiency that no order on the same placement exceeds under the cap.

    See `memory_time_bound`.
    A search knows its own, over all placements that it may use, and that in any number of strips.
    """
    if schedule.name == CAPPED:
        return _search_bounds(run)
    allow = allowed_actions(run, schedule)
    return (
        memory_time_bound(
            costs, schedule.placement, cap, schedule.has_split_backward, network, allow
        ),
        None,
    )


def _search_bounds(run: RunSpec) -> tuple[float, float]:
    found = search_schedule(run)
    return float(found["bound"]), float(found["bound_any_strips"])


def allowed_actions(run: RunSpec, schedule: Schedule) -> tuple[str, ...]:
    """Return the memory actions that the bound allows.

    The schedule's own, and those that the run lets a search use.
    """
    used = {
        name
        for name, kind in (("recompute", Kind.R), ("offload", Kind.OFFLOAD))
        if schedule.has_any(kind)
    }
    return tuple(sorted(used | set(run.schedule.memory_actions), reverse=True))

"""The plan of a run: from a resolved configuration to all that its ranks are given, one stage after another.

Costs (from the profile, if asked), schedule, partition and memory plan are made in this order;
`predict` then says what a step takes. Everything that needs a run's plan gets it here, so that it
is the same for all.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import NoReturn

from gems.config.resolve import check_batch, check_gpus
from gems.config.schema import ORDERED_TRANSPORTS, CostConfig, RunSpec
from gems.data import IMAGES, kind_of
from gems.errors import ConfigError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import MemoryPlan, plan_of_schedule
from gems.models import layers_of
from gems.partition.links import network_in_seconds, network_in_units
from gems.partition.methods import partition_case, profile_used
from gems.profile import ModelProfile
from gems.profile.store import profile_of
from gems.runs.strips_choice import with_fastest_strips
from gems.schedule import CAPPED, PLACED
from gems.schedule.costs import Network, StageCosts
from gems.schedule.edges import check_message_order
from gems.schedule.lower import compute_only
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from gems.simulation.build import compute_schedule, lowered_schedule, lowered_within, partition_of
from gems.simulation.costs import schedule_costs, simulate_step
from gems.simulation.memory_case import check_fits, memory_case, memory_outcome, node_host_bytes
from gems.simulation.model_costs import PROFILE
from gems.simulation.prediction import Prediction, predict_outcome, predict_schedule
from gems.simulation.profiled_costs import profiled_costs, with_profiled_costs

MAX_ACTIONS = 200_000  # simulated in some seconds
KEY = "parallel.strips"
HAS_CLOCK = ("real", "emulated")
WITHOUT_RATES = (
    "auto",
    "cuda",
)  # machines with the default rates, which are those of a processor's core


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a resolved configuration becomes.

    Raises:
        ConfigError: links that match messages by order, and a schedule whose ranks do not send in
            the order in which others receive.
    """

    spec: RunSpec  # as its user resolved it, from which the run has its identity
    costs: CostConfig  # those configured, or with cost=profile those of the profile
    schedule: Schedule  # lowered and validated: the one list that ranks run
    boundaries: tuple[
        int, ...
    ] = ()  # where layers are cut; none without devices, or if operators are placed
    profile: ModelProfile | None = None  # what the partition was made from, if it needed one
    memory: PlanOutcome | None = None  # of the memory policy; None if activations are kept
    kept: PlanOutcome | None = None  # in strips, where they are kept: what that takes

    def __post_init__(self) -> None:
        transport = self.spec.machine.transport
        if transport in ORDERED_TRANSPORTS:
            check_message_order(self.schedule, transport)

    @property
    def held(self) -> PlanOutcome | None:
        """What ranks hold under the memory policy or in strips, None if only the partition tells."""
        return self.memory or self.kept

    @property
    def run(self) -> RunSpec:
        """The configuration with the plan's costs, for simulation."""
        return replace(self.spec, cost=self.costs)

    @property
    def stage_costs(self) -> StageCosts:
        """What the schedule is simulated with.

        In the units of `costs`, under a memory policy in seconds and bytes.
        """
        return (
            schedule_costs(self.run, self.schedule.placement)
            if self.memory is None
            else self.memory.costs
        )

    @property
    def network(self) -> Network:
        """The links, in the units of `stage_costs`."""
        return network_in_units(self.run) if self.memory is None else network_in_seconds(self.run)

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The segments of each stage, None if stages run whole."""
        if self.memory is None:
            return None
        return (
            self.memory.plan
            if self.schedule.num_strips == 1
            else self.memory.plan.between(self.boundaries)
        )


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest rank's bytes on its device, and what the ranks of a node hold in host memory together."""

    rank: int
    device_bytes: int
    host_bytes: int


def plan_run(spec: RunSpec, trains: bool = True) -> RunPlan:
    """Return the plan of a resolved run that is about to start.

    Unless it `trains`, what training in strips would need of the layers and of memory is not asked.

    A search of the schedule is one over the stages of the model, by its profile unless costs are
    configured, and finds the partition too. What is found is kept in the cache, so that all who ask
    get the same.

    Raises:
        ConfigError: counts or a cap that the schedule cannot serve, more stages than layers, a
            profile that cannot be had, other ranks than parallel.gpus, or less data than one step
            takes.
        DoesNotFitError: a rank would hold more than its device, or a node's ranks more than its
        host memory. ScheduleError: a schedule that would not run.
    """
    check_gpus(spec)
    is_compiled = spec.train.compile and trains and spec.machine.kind == "real"
    if is_compiled:
        _check_compiled(spec)
    spec = with_strips_chosen(spec)
    _check_strips(spec)
    run = with_profiled_costs(_of_model(spec))
    schedule = lowered_schedule(run)
    if is_compiled:
        _check_compiled(spec, schedule)
    check_batch(spec)
    if spec.machine.kind != "real" or schedule.placement.feeders is not None:
        return RunPlan(spec, run.cost, schedule)
    if schedule.num_strips > 1:
        return _plan_in_strips(spec, run, schedule, trains)
    if schedule.has_memory_actions:
        return _acting_plan(spec, run, schedule)
    boundaries = partition_of(run, schedule).boundaries
    schedule = _within_device(run, schedule, boundaries)
    if spec.memory.name == "keep":
        return RunPlan(spec, run.cost, schedule, boundaries, _profile(run, schedule))
    case = memory_case(run, compute_only(schedule), boundaries)
    outcome = memory_outcome(run, case)
    return RunPlan(
        spec, run.cost, validate(outcome.schedule, outcome.costs), boundaries, case.profile, outcome
    )


def with_strips_chosen(spec: RunSpec) -> RunSpec:
    """Return a resolved run with a number of strips.

    Its own, or if that is open the one that trains fastest.
    Layers take the times of their profile, unless costs are configured.

    Raises:
        ConfigError, DoesNotFitError: as `with_fastest_strips`.
    """
    if spec.parallel.strips:
        return spec
    return with_fastest_strips(spec, lambda one: step_s(plan_run(one)))


def with_strips_chosen_on_paper(spec: RunSpec) -> RunSpec:
    """Return the same for a run that is only simulated, by its configured costs.

    Raises:
        ConfigError, DoesNotFitError: as `with_fastest_strips`.
    """
    if spec.parallel.strips or spec.memory.name != "keep":
        return with_strips_chosen(spec)
    return with_fastest_strips(spec, lambda one: step_s(plan_simulation(one)))


def step_s(plan: RunPlan) -> float:
    """Return the seconds of a step, of a run with devices by the profile of its layers unless costs are configured."""
    spec = plan.spec
    run = plan.run
    if plan.memory is not None:
        return plan.memory.step_s
    if plan.boundaries and run.cost == CostConfig():
        run = _by_profile(plan, plan.profile or profile_of(spec))
    return simulate_step(run, plan.schedule)[1].span * run.cost.unit_s


def _by_profile(plan: RunPlan, profile: ModelProfile) -> RunSpec:
    """Return the run with costs by its layers.

    The cap was kept by the plan's, and has another unit by these.
    """
    free = replace(plan.spec.schedule, activation_cap=None, activation_cap_bytes=None)
    return replace(
        plan.spec, cost=profiled_costs(plan.spec, profile, plan.boundaries), schedule=free
    )


def _check_strips(spec: RunSpec) -> None:
    """Check that a run that trains can do so in strips, as far as that is known without its layers.

    Raises:
        ConfigError: it cannot.
    """
    strips = spec.parallel.strips
    data = spec.data
    if strips == 1 or spec.machine.kind != "real":
        return
    faults = {
        f"data.name={data.name}, whose samples are no images": kind_of(data) != IMAGES,
        "schedule.memory_actions": bool(spec.schedule.memory_actions),
        f"schedule={spec.schedule.name}, a graph of stages": spec.schedule.name == PLACED,
        f"data.height_px={data.height_px}, which has fewer rows": strips > data.height_px,
    }
    for fault in (text for text, is_so in faults.items() if is_so):
        _refuse_strips(spec, fault)


def _check_compiled(spec: RunSpec, schedule: Schedule | None = None) -> None:
    """Check that layers can be compiled in a run, as far as that is known without its schedule.

    Raises:
        ConfigError: it runs parts of a layer's own forward or backward, or counts on what that
        keeps.
    """
    strips = spec.parallel.strips
    name = spec.schedule.name
    precision = spec.train.precision
    cap = spec.schedule.activation_cap_bytes
    for is_so, fault, advice in (
        (
            strips != 1,
            f"parallel.strips={strips}, for which each operation of a layer has a form of its own",
            "leave parallel.strips out",
        ),
        (
            spec.memory.name != "keep",
            f"memory={spec.memory.name}, which plans by what layers keep as they are",
            "use memory=keep",
        ),
        (
            cap is not None,
            f"schedule.activation_cap_bytes={cap}, which counts what layers keep as they are",
            "give schedule.activation_cap, in micro-batches",
        ),
        (
            spec.train.compute_dtype in ("bfloat16", "float16"),
            (
                f"train.precision={precision}, whose rounding between operations compiled kernels"
                " leave out"
            ),
            "use train.precision=float32",
        ),
        (
            schedule is not None and schedule.has_split_backward,
            f"schedule={name}, which runs the backward of each layer in two parts",
            "use a schedule with a whole backward, such as 1f1b or gems_master",
        ),
        (
            schedule is not None and schedule.has_memory_actions,
            f"schedule={name}, whose list recomputes or moves what layers keep",
            "use another schedule",
        ),
    ):
        if is_so:
            raise ConfigError(
                "train.compile",
                "true",
                f"excludes {fault}",
                f"{advice}, or set train.compile=false",
            )


def plan_simulation(spec: RunSpec) -> RunPlan:
    """Return the plan of a resolved run that is only simulated.

    Its stages may outnumber the layers of its model.

    Raises:
        ConfigError, DoesNotFitError, ScheduleError: as `plan_run`.
    """
    if spec.memory.name != "keep":
        return plan_run(spec)
    spec = with_strips_chosen_on_paper(spec)
    run = with_profiled_costs(spec)
    schedule = lowered_schedule(run)
    if run.cost.name == PROFILE and schedule.has_memory_actions:
        return _acting_plan(spec, run, schedule)
    if (
        run.cost.name == PROFILE
        and run.machine.device_bytes is not None
        and schedule.num_strips == 1
    ):
        schedule = _within_device(run, schedule, partition_of(run, schedule).boundaries)
    return RunPlan(spec, run.cost, schedule)


def plan_policies(spec: RunSpec) -> MemoryCase:
    """Return what any memory policy of a resolved run would plan for.

    The device does not limit its partition.

    Raises:
        ConfigError: counts that the schedule cannot serve, more stages than layers, or a profile
        that cannot be had.
    """
    run = with_profiled_costs(_of_model(with_strips_chosen(spec)))
    compute = compute_schedule(run)
    return memory_case(run, compute, _unlimited_partition(run, compute))


def simulate(spec: RunSpec) -> Prediction:
    """Simulate one step of a resolved run: times, efficiency, bound and peak bytes.

    Raises:
        ConfigError, DoesNotFitError, ScheduleError: as `plan_run`.
    """
    return predict(plan_simulation(spec))


def predict(plan: RunPlan) -> Prediction:
    """Simulate one step of a plan, one pipeline for all replicas, which are alike.

    Raises:
        DoesNotFitError: a rank would hold more than its device, by the profile of its layers.
    """
    return (
        predict_schedule(plan.run, plan.schedule)
        if plan.memory is None
        else predict_outcome(plan.run, plan.memory)
    )


def predict_peaks(plan: RunPlan) -> tuple[int, ...] | None:
    """Return the peak bytes on the device of each rank of a pipeline, None if the planned run has no profile."""
    if plan.held is not None:
        return plan.held.peak_bytes
    if plan.profile is None:
        return None
    return partition_case(plan.spec, plan.schedule, plan.profile).peak_bytes(plan.boundaries)


def predict_peak(plan: RunPlan) -> Peak | None:
    """Return the peak bytes of a planned run, None if it has no profile."""
    peaks = predict_peaks(plan)
    if peaks is None:
        return None
    rank = peaks.index(max(peaks))
    host_bytes = (0,) if plan.held is None else plan.held.host_bytes
    return Peak(rank, peaks[rank], node_host_bytes(plan.spec, host_bytes))


def predict_steps_s(plan: RunPlan) -> float | None:
    """Return the seconds of all steps of a planned run, None if its costs are not known.

    They are known for a run with timed waits, and if a profile measured them or the machine has
    rates.
    """
    spec = plan.spec
    profile = plan.profile
    steps = plan.spec.train.steps
    if spec.machine.kind not in HAS_CLOCK or sum(map(len, plan.schedule.rows)) > MAX_ACTIONS:
        return None
    run = plan.run
    if spec.machine.kind == "real":
        is_guess = (
            profile is not None and profile.source == "fake" and spec.machine.name in WITHOUT_RATES
        )
        if profile is None or (is_guess and spec.cluster.gpus_per_node):
            return None
        if plan.memory is not None:
            return steps * plan.memory.step_s
        if run.cost.name != PROFILE:
            run = _by_profile(plan, profile)
    return steps * simulate_step(run, plan.schedule)[1].span * run.cost.unit_s


def _of_model(spec: RunSpec) -> RunSpec:
    """Return the run with what the search of a schedule that will run needs to know of its model.

    Unless costs are configured that is its profile, with configured ones only how many stages its
    layers can make.
    """
    if spec.machine.kind != "real" or spec.schedule.name != CAPPED or spec.cost.name == PROFILE:
        return spec
    if spec.cost == CostConfig():
        return replace(spec, cost=CostConfig(name=PROFILE))
    most = min(len(layers_of(spec.model, spec.data)), spec.schedule.max_stages or sys.maxsize)
    return replace(spec, schedule=replace(spec.schedule, max_stages=most))


def _unlimited_partition(run: RunSpec, schedule: Schedule) -> tuple[int, ...]:
    """Return the boundaries of a run in which more than the partition decides what fits the device."""
    return partition_of(
        replace(run, machine=replace(run.machine, device_bytes=None)), schedule
    ).boundaries


def _plan_in_strips(spec: RunSpec, run: RunSpec, schedule: Schedule, trains: bool) -> RunPlan:
    """Return the plan of a run in strips, whose memory policy has a choice for each stage.

    Raises:
        ConfigError: a layer that needs the whole image, or a list from a file that recomputes or
        moves activations. DoesNotFitError: a rank would hold more than its device, or a node's
        ranks more than its host memory.
    """
    if schedule.has_memory_actions:
        _refuse_strips(spec, "a list that recomputes or moves activations")
    boundaries = _unlimited_partition(run, schedule)
    if not trains:
        return RunPlan(spec, run.cost, schedule, boundaries)
    profile = profile_of(run)
    case = memory_case(run, compute_only(schedule), boundaries, profile)
    if spec.memory.name != "keep":
        outcome = memory_outcome(run, case)
        return RunPlan(
            spec, run.cost, validate(outcome.schedule, outcome.costs), boundaries, profile, outcome
        )
    kept = case.outcome(MemoryPlan.keeping(case.boundaries), schedule)
    check_fits(run, kept)
    return RunPlan(spec, run.cost, schedule, boundaries, profile, kept=kept)


def _refuse_strips(spec: RunSpec, fault: str) -> NoReturn:
    raise ConfigError(KEY, spec.parallel.strips, f"must be 1 for a run that trains with {fault}")


def _profile(run: RunSpec, schedule: Schedule) -> ModelProfile | None:
    """Return the profile that a run is planned with, if it needs one."""
    return profile_of(run) if run.cost.name == PROFILE else profile_used(run, schedule)


def _acting_plan(spec: RunSpec, run: RunSpec, schedule: Schedule) -> RunPlan:
    """Return the plan of a schedule that recomputes or moves the activations of stages itself.

    Raises:
        DoesNotFitError: it leaves too much on a device or in host memory.
    """
    case = memory_case(run, compute_only(schedule), _unlimited_partition(run, schedule))
    outcome = case.as_run(case.outcome(plan_of_schedule(case.schedule, case.boundaries)))
    check_fits(run, outcome)
    return RunPlan(
        spec,
        run.cost,
        validate(outcome.schedule, outcome.costs),
        case.boundaries,
        case.profile,
        outcome,
    )


def _within_device(run: RunSpec, schedule: Schedule, boundaries: tuple[int, ...]) -> Schedule:
    """Return the schedule, or if the buffers of its early receives do not fit, that with the fewest buffers."""
    limit = run.machine.device_bytes
    if limit is None:
        return schedule
    case = partition_case(run, schedule)

    def peak_bytes(lowered: Schedule) -> tuple[int, ...]:
        return replace(case, schedule=lowered).peak_bytes(boundaries)

    return validate(lowered_within(run, compute_only(schedule), peak_bytes, limit)[0])

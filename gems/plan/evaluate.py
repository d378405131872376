"""The plan of a run: from a resolved configuration to everything that its ranks need.

The order is costs (from the profile, if requested), schedule, partition and memory plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from gems.config.cluster import ORDERED_TRANSPORTS
from gems.config.resolve import check_batch, check_gpus
from gems.config.schema import (
    CostConfig,
    DataConfig,
    MemoryConfig,
    ParallelConfig,
    RunSpec,
    ScheduleConfig,
    TrainConfig,
)
from gems.data import IMAGES, kind_of
from gems.errors import ConfigError
from gems.memory.case import PlanOutcome
from gems.memory.plan import MemoryPlan, plan_of_schedule
from gems.plan.draft import Draft
from gems.plan.rank_plan import RankPlan
from gems.plan.strips_choice import KEY, with_fastest_strips
from gems.profile import ModelProfile
from gems.profile.subject import Subject
from gems.schedule import is_searched
from gems.schedule.edges import check_message_order
from gems.schedule.lower import compute_only
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from gems.simulation.build import kept_within
from gems.simulation.calibration import Confidence, confidence_of
from gems.simulation.costs import RunCosts
from gems.simulation.memory_case import Room
from gems.simulation.prediction import Prediction, predict, with_jitter
from gems.simulation.profiled_costs import profiled_costs

MAX_ACTIONS = 200_000  # simulated within a few seconds
# Machines with the default rates, which are the rates of a CPU core.
WITHOUT_RATES = ("auto", "cuda")


@dataclass(frozen=True, slots=True)
class Peak:
    """The device bytes of the fullest rank, and the host bytes of all ranks of a node together."""

    rank: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a resolved configuration.

    Raises:
        ConfigError: the links match messages by order, and the ranks of the schedule do not send in
            the order in which others receive.
    """

    spec: RunSpec  # as resolved from the user's configuration; it identifies the run
    run_costs: RunCosts  # the configured costs, or with cost=profile the costs of the profile
    memory: PlanOutcome  # the memory plan, and the step with it
    # the largest efficiencies under the cap of a search: in its strips, and in any number of them
    bounds: tuple[float, float | None] | None = None
    # the cuts between layers; none without devices, or if operators are placed
    boundaries: tuple[int, ...] = ()
    profile: ModelProfile | None = None  # the partition's profile, if it needed one

    def __post_init__(self) -> None:
        transport = self.spec.machine.transport
        if transport in ORDERED_TRANSPORTS:
            check_message_order(self.schedule, transport)

    @property
    def costs(self) -> CostConfig:
        """The costs in the form of the configuration."""
        return self.run_costs.cost

    @property
    def schedule(self) -> Schedule:
        """The lowered and validated schedule, which the ranks run."""
        return self.memory.schedule

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The segments of each stage; None if stages run whole."""
        if not self.memory.is_segmented:
            return None
        return (
            self.memory.plan
            if self.schedule.num_strips == 1
            else self.memory.plan.between(self.boundaries)
        )

    @property
    def for_ranks(self) -> RankPlan:
        """The part of the plan that ranks read."""
        return RankPlan(self.spec, self.schedule, self.boundaries, self.memory_plan)

    @property
    def peak_bytes(self) -> tuple[int, ...] | None:
        """The peak device bytes of each rank of a pipeline; None if the run has no profile."""
        return None if self.memory.case is None else self.memory.peak_bytes

    @property
    def peak(self) -> Peak | None:
        """The peak of the fullest rank; None if the planned run has no profile."""
        peaks = self.peak_bytes
        if peaks is None:
            return None
        rank = self.memory.fullest_rank
        spec = self.spec
        room = Room.of(spec.machine, spec.parallel, spec.cluster.ranks_per_node)
        return Peak(rank, peaks[rank], room.node_bytes(self.memory.host_bytes))

    @property
    def confidence(self) -> Confidence:
        """The confidence in the time of a step by its layers."""
        return confidence_of(Subject.of(self.spec))

    @property
    def step_s(self) -> float:
        """Seconds of a step, the median of drawn ones under machine.noise.

        For a run with devices they follow from the profile of its layers, unless costs are
        configured.
        """
        if self.boundaries and self.costs == CostConfig():
            return self._median_step_s(self._by_layers(self.profile or Draft(self.spec).profile))
        return self._median_step_s(self.memory)

    @property
    def steps_s(self) -> float | None:
        """Seconds of all steps; None if the costs of the steps are not known.

        They are known for a run with timed waits, if a profile measured them, or if the machine has
        rates.
        """
        spec = self.spec
        profile = self.profile
        steps = spec.train.steps
        num_actions = sum(map(len, self.schedule.rank_schedules))
        if not spec.machine.takes_steps or num_actions > MAX_ACTIONS:
            return None
        if not spec.machine.is_real:
            return steps * self._median_step_s(self.memory)
        if profile is None:
            return None
        is_guess = profile.source == "fake" and spec.machine.name in WITHOUT_RATES
        if is_guess and spec.cluster.gpus_per_node:
            return None
        return steps * self._median_step_s(self._by_layers(profile))

    def _median_step_s(self, outcome: PlanOutcome) -> float:
        return with_jitter(outcome, self.spec.machine.noise, self.spec.seed)[0].span

    def _by_layers(self, profile: ModelProfile) -> PlanOutcome:
        """Return the step with the times of the layers.

        The activation cap is left out: it was checked with the plan's costs, and has another unit.
        """
        if self.memory.is_segmented or self.costs.from_layers:
            return self.memory
        costs = profiled_costs(self.run_costs.uncapped, profile, self.boundaries)
        return costs.kept(self.schedule)

    def predict(self) -> Prediction:
        """Simulate one step of one pipeline; all replicas are alike."""
        run = replace(self.spec, cost=self.costs)
        return predict(run, self.run_costs, self.memory, self.bounds)


def evaluate(
    spec: RunSpec, trains: bool = True, runs: bool = True, profile: ModelProfile | None = None
) -> Plan:
    """Return the plan of a resolved run.

    If `trains` is False, skip the checks that only strip-wise training needs. If `runs` is False,
    the run is only simulated: its costs are as configured, and its stages may outnumber the layers
    of its model. A given `profile` takes the place of the configured one.

    A search for a schedule covers the stages of the model and also finds the partition. It uses the
    model's profile unless costs are configured. Its result is cached, so that all callers get the
    same.

    Raises:
        ConfigError: the schedule cannot serve the counts or the cap, there are more stages than
            layers, a profile is not available, the ranks differ from parallel.gpus, or there is
            less data than one step takes.
        DoesNotFitError: a rank would exceed its device, or the ranks of a node its host memory.
        ScheduleError: the schedule would not run.
    """
    runs = runs or not spec.memory.keeps
    if runs:
        check_gpus(spec.parallel)
        if trains and spec.machine.is_real:
            _check_compiled(spec.train, spec.memory, spec.parallel.num_strips, spec.schedule)
    spec = with_strips_chosen(spec, runs)
    if runs and spec.parallel.num_strips > 1 and spec.machine.is_real:
        _check_strips(spec.parallel, spec.data, spec.schedule)
    return finish(Draft(spec, runs, profile), trains)


def finish(draft: Draft, trains: bool = True) -> Plan:
    """Return the plan of a draft.

    Raises:
        ConfigError, DoesNotFitError, ScheduleError: as `evaluate`.
    """
    spec = draft.spec
    costs = draft.costs
    # a policy lowers the schedule itself
    is_trial = draft.known is not None and not spec.memory.keeps
    schedule = draft.compute if is_trial else draft.lowered
    if draft.runs and spec.machine.is_real:
        if trains:
            _check_compiled(
                spec.train, spec.memory, spec.parallel.num_strips, spec.schedule, schedule
            )
        check_batch(spec.data, spec.parallel.global_batch)
    from_layers = draft.run.cost.from_layers
    bounds = None
    if is_searched(schedule.name) and costs.cap is not None:
        bounds = float(draft.search_result["bound"]), float(draft.search_result["bound_any_strips"])
    by_layers = spec.machine.is_real if draft.runs else from_layers
    if not by_layers or not schedule.placement.is_chain:
        return Plan(spec, costs, costs.kept(schedule), bounds)
    acts = schedule.has_memory_actions
    is_whole = schedule.num_strips == 1
    if acts and not is_whole:
        _refuse_strips(spec.parallel.strips, "a list that recomputes or moves activations")
    is_kept = spec.memory.keeps and not acts
    is_limited = is_kept and is_whole
    # a candidate's given cut is judged by the bytes of its ranks alone
    boundaries = draft.partition(schedule, is_limited and draft.known is None).boundaries
    uses_profile = from_layers or draft.partitioner.uses_profile(schedule)
    if not (uses_profile if is_limited else trains or is_whole):
        return Plan(spec, costs, costs.kept(schedule), bounds, boundaries)
    policy = draft.policy
    case = policy.case(compute_only(schedule), boundaries, draft.profile)
    if is_kept:
        outcome = kept_within(costs, schedule, case)
        policy.room.check(outcome)
    else:
        by_list = plan_of_schedule(case.schedule, case.boundaries) if acts else None
        plan = by_list or policy.plan(case)
        outcome = policy.outcome(case, plan)
        if draft.known is None:
            validate(outcome.schedule, outcome.costs)
    return Plan(spec, costs, outcome, bounds, boundaries, draft.profile)


def with_strips_chosen(spec: RunSpec, runs: bool = True) -> RunSpec:
    """Return a resolved run with its number of strips, or with the fastest one if that is open.

    The times of layers come from their profile, unless costs are configured or the run is only
    simulated.

    Raises:
        ConfigError, DoesNotFitError: as `with_fastest_strips`.
    """
    if spec.parallel.num_strips:
        return spec
    return with_fastest_strips(spec, lambda divided: evaluate(divided, runs=runs).step_s)


with_strips_on_paper = partial(with_strips_chosen, runs=False)


def simulate(spec: RunSpec) -> Prediction:
    """Simulate one step of a resolved run: times, efficiency, bound and peak bytes.

    Raises:
        ConfigError, DoesNotFitError, ScheduleError: as `evaluate`.
    """
    return evaluate(spec, runs=False).predict()


def _check_strips(parallel: ParallelConfig, data: DataConfig, schedule: ScheduleConfig) -> None:
    """Check that a run can train in strips, as far as this is known without its layers.

    Raises:
        ConfigError: it cannot.
    """
    sides = {f"data.{name}": side for name, side in data.sides.items()}
    divided = list(zip(sides.items(), parallel.grid, strict=False))
    axes = len(parallel.grid)
    faults = {
        f"data.name={data.name}, whose samples are no images": kind_of(data) != IMAGES,
        "schedule.memory_actions": bool(schedule.memory_actions),
        f"{' and '.join(sides)}, which are fewer than its {axes} axes": axes > len(sides),
        **{
            f"{key}={side}, which is less than its {parts} parts": parts > side
            for (key, side), parts in divided
        },
    }
    for fault in (text for text, is_so in faults.items() if is_so):
        _refuse_strips(parallel.strips, fault)


def _check_compiled(
    train: TrainConfig,
    memory: MemoryConfig,
    strips: int,
    config: ScheduleConfig,
    schedule: Schedule | None = None,
) -> None:
    """Check that train.compile suits a run, as far as this is known without its schedule.

    Raises:
        ConfigError: the run splits a layer's forward or backward, or depends on the bytes that
            layers save.
    """
    if not train.compile:
        return
    for is_so, fault, advice in _compile_conflicts(train, memory, strips, config, schedule):
        if is_so:
            raise ConfigError(
                "train.compile",
                "true",
                f"excludes {fault}",
                f"{advice}, or set train.compile=false",
            )


def _compile_conflicts(
    train: TrainConfig,
    memory: MemoryConfig,
    strips: int,
    config: ScheduleConfig,
    schedule: Schedule | None,
) -> tuple[tuple[bool, str, str], ...]:
    """Return whether each feature that excludes train.compile is used, its text and the advice."""
    cap = config.activation_cap_bytes
    return (
        (
            train.cuda_graphs is True,
            "train.cuda_graphs=true, which captures the kernels of layers as they are",
            "set train.cuda_graphs=false or auto",
        ),
        (
            strips != 1,
            f"parallel.strips={strips}, for which each operation of a layer has a form of its own",
            "leave parallel.strips out",
        ),
        (
            not memory.keeps,
            f"{memory.choice}, which plans by the bytes that layers save as they are",
            "use memory=keep",
        ),
        (
            cap is not None,
            f"schedule.activation_cap_bytes={cap}, which counts what layers keep as they are",
            "give schedule.activation_cap, in micro-batches",
        ),
        (
            train.compute_dtype in ("bfloat16", "float16"),
            (
                f"train.precision={train.precision}, whose rounding between operations compiled kernels"
                " leave out"
            ),
            "use train.precision=float32",
        ),
        (
            schedule is not None and schedule.has_split_backward,
            f"schedule={config.name}, which runs the backward of each layer in two parts",
            "use a schedule with a whole backward, such as 1f1b or gems_master",
        ),
        (
            schedule is not None and schedule.has_memory_actions,
            f"schedule={config.name}, which recomputes or offloads activations itself",
            "use another schedule",
        ),
    )


def _refuse_strips(strips: int | list[int], fault: str) -> NoReturn:
    raise ConfigError(KEY, strips, f"must be 1 for a run that trains with {fault}")

"""What a candidate takes: by its profile, its partition, the very schedule that would run, and simulation."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from math import ceil, inf, log
from operator import attrgetter

import numpy as np

from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.case import PlanOutcome
from gems.memory.model import OPTIMIZERS, MemoryModel, Optimizer
from gems.memory.registry import plan_within
from gems.memory.timeline import rank_timeline, segment_costs, stage_costs
from gems.partition.exact import solve
from gems.partition.methods import PartitionCase, optimizer_name
from gems.partition.problem import InfeasibleError, Problem
from gems.planner.search import bounds
from gems.planner.search.best_first import Rules, TooLarge, TooSlow
from gems.planner.search.candidate import KEEP, Candidate
from gems.planner.search.choice import Choice
from gems.profile import ModelProfile
from gems.profile.scaling import extrapolate
from gems.profile.spans import RankCosts, Spans
from gems.profile.store import profile_of
from gems.schedule import CAPPED
from gems.schedule.costs import StageCosts
from gems.schedule.formats.schedule_json import from_json
from gems.schedule.ledger import TOLERANCE, in_flight, peaks
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, looped
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, Span, simulate
from gems.simulation.build import compute_schedule, lowered_within, search_schedule
from gems.simulation.costs import (
    activation_cap,
    parts_s,
    replica_pace,
    schedule_costs,
    simulate_step,
)
from gems.simulation.memory_case import fits_host, memory_case
from gems.simulation.model_costs import PROFILE
from gems.simulation.prediction import with_jitter
from gems.simulation.profiled_costs import profiled_costs

ESTIMATE_ERROR = 1.25  # times the limit, up to which what is estimated to be held may well fit
EFFORT = 128  # in actions, up to which candidates are tried in the order of their bounds alone
ROUNDING = 1e-8  # of sums in another order, and of scores to nine digits
PROFILED_SIZES = (1, 2)  # micro-batches of other sizes follow from these
PLAN_BUDGET_S, SEARCH_BUDGET_S = (
    3.0,
    1.0,
)  # of memory=plan and schedule=capped, of which there are many candidates
CHANGED = (
    "schedule.activation_cap",
    "schedule.activation_cap_bytes",
    "schedule.memory_actions",
    "schedule.budget_s",
    "memory.offload_inputs",
    "memory.budget_s",
    "parallel.strips",
)
CUT_BUDGET_S = 1.0  # of a partition
MAX_TABLE_BYTES = 2**29  # of the tables in which a partition within bytes is sought
Epochs = Callable[[int], float]


class ProfiledModel:
    """A model at one micro-batch size: its profile, what the bounds need of it, and its partitions."""

    def __init__(self, profile: ModelProfile, optimizer: Optimizer) -> None:
        self.profile = profile
        self._optimizer = optimizer
        self.spans = Spans(profile)
        self.by_time = cache(self._by_time)
        self.by_bytes = cache(self._by_bytes)

    @cached_property
    def load(self) -> bounds.Load:
        """What one micro-batch is."""
        return bounds.Load(self.profile, self._optimizer)

    def _by_time(self, placement: Placement) -> tuple[tuple[int, ...], float]:
        """Return the partition whose heaviest rank computes least, and the seconds that this takes it at least.

        It is exact where ranks hold one stage or a pair of them; where they hold several in a row
        of chunks, each stage is weighed by itself.
        """
        num_stages = placement.num_stages
        num_ranks = placement.num_ranks
        is_alone = num_stages > 2 * num_ranks or (
            num_stages > num_ranks and placement == looped(num_ranks, 2)
        )
        ranks = []
        for rank in range(num_stages if is_alone else num_ranks):
            held = ((0, rank),) if is_alone else placement.stages_on(rank)
            counts = sorted(Counter(stage for _, stage in held).items())
            shares = (count / placement.num_directions for _, count in counts)
            tables = tuple(partial(np.multiply, share, self.spans.time_s) for share in shares)
            ranks.append(RankCosts(tuple(stage for stage, _ in counts), (tables,)))
        best = solve(self._problem(num_stages, tuple(dict.fromkeys(ranks))), CUT_BUDGET_S)
        return best.boundaries, 0.0 if is_alone else best.cost if best.is_optimal else best.bound

    def _by_bytes(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the partition whose stages hold alike.

        What one micro-batch keeps, as often as `counts` has it.
        """
        ranks = tuple(
            RankCosts((stage,), ((partial(np.multiply, float(count), self.spans.stash),),))
            for stage, count in enumerate(counts)
        )
        return solve(self._problem(len(counts), ranks)).boundaries

    def within(
        self, schedule: Schedule, optimizer: str, limit_bytes: int
    ) -> tuple[int, ...] | None:
        """Return the exact partition for a lowered schedule, of the least time within the bytes.

        None where its tables are too large, or nothing fits.
        """
        case = PartitionCase(self.profile, schedule, optimizer, limit_bytes)
        case.__dict__["spans"] = self.spans
        num_tables = sum(
            len(rank.moments) * len(rank.stages) for rank in dict.fromkeys(case.memory)
        )
        if num_tables * 8 * self.spans.num_layers**2 > MAX_TABLE_BYTES:
            return None
        try:
            return solve(case.problem("time"), CUT_BUDGET_S).boundaries
        except InfeasibleError:
            return None

    def _problem(self, num_stages: int, ranks: tuple[RankCosts, ...]) -> Problem:
        return Problem(self.spans.num_layers, num_stages, ranks, self.spans.boundary_bytes())


def stashes(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage of a schedule the most micro-batches in flight on it."""
    counts = [1] * schedule.num_stages
    for row in schedule.rows:
        for action, now in in_flight(row):
            counts[action.stage] = max(counts[action.stage], now[action.stage])
    return tuple(counts)


@dataclass(frozen=True)
class _Scheduled:
    """A candidate with a partition: its run and its compute-only schedule.

    `is_by_bytes` tells the two partitions.
    """

    boundaries: tuple[int, ...]
    run: RunSpec
    is_by_bytes: bool = False
    found: Schedule | None = None  # of a search

    @cached_property
    def compute(self) -> Schedule:
        """The schedule, which is built when it is first asked for."""
        return self.found or compute_schedule(self.run)


def _keeps_cap(made: _Scheduled) -> bool:
    """Return whether a schedule that is cut so would not be refused under its cap."""
    cap = activation_cap(made.run)
    return (
        cap is None
        or max(peaks(made.compute, schedule_costs(made.run, made.compute.placement)))
        <= cap + TOLERANCE
    )


@dataclass(frozen=True)
class Planner:
    """Judges candidates for a run.

    `spec` is the resolved one that has everything that no candidate chooses.
    `epochs` gives the epochs to the target by global batch, where they are known: then choices are
    ranked by the seconds to it. `models` holds profiles and partitions by micro-batch size, which
    do not depend on the limit.
    """

    spec: RunSpec
    limit_bytes: int | None
    epochs: Epochs | None = None
    models: dict[int, ProfiledModel] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes whose profiles are taken; of a profile that was given, its own."""
        given = self.spec.profile.path is not None
        return (self.spec.parallel.micro_batch_size,) if given else PROFILED_SIZES

    def model(self, size: int) -> ProfiledModel:
        """Return the model at a micro-batch size.

        Beyond two images its profile follows from those of one and two.

        Raises:
            ConfigError: a profile that cannot be had.
        """
        if size not in self.models:
            if size in self.sizes:
                profile = self._own_profile(size)
            else:
                points = [self.model(each).profile for each in self.sizes]
                profile = extrapolate(
                    points, self.spec.data.height_px, self.spec.data.width_px, size
                )
            self.models[size] = ProfiledModel(profile, self._optimizer)
        return self.models[size]

    def _own_profile(self, size: int) -> ModelProfile:
        parallel = replace(self.spec.parallel, micro_batch_size=size, strips=1)
        return profile_of(replace(self.spec, parallel=parallel))

    def confirmed(self, best: Sequence[Choice]) -> tuple[Choice, ...]:
        """Return choices by the profiles of their own micro-batch sizes, as a run has them, without those too large.

        Choices stay as they are if none fits, or if a profile cannot be had.
        """
        sizes = {
            choice.candidate.micro_batch_size for choice in best if choice.candidate.strips == 1
        }
        guessed = sizes.difference(self.sizes)
        try:
            own = {
                size: ProfiledModel(self._own_profile(size), self._optimizer)
                for size in sorted(guessed)
            }
        except ConfigError:
            return tuple(best)
        judge = replace(self, models=self.models | own)
        judged = [
            judge.evaluate(one) if one.strips == 1 and one.micro_batch_size in guessed else choice
            for choice in best
            for one in (choice.candidate,)
        ]
        fitting = [self.with_noise(choice) for choice in judged if isinstance(choice, Choice)]
        return tuple(sorted(fitting, key=lambda each: (each.score_s, each.most_bytes))) or tuple(
            best
        )

    def rules(self) -> Rules[Candidate, Choice]:
        """Return how the search judges candidates: by seconds of a step, or to the target."""
        return Rules(
            lambda one: self.score(
                one, bounds.least_step_s(one, self.model(one.micro_batch_size).load)
            ),
            lambda one: self.score(one, self._refined_s(one)),
            lambda one: self.limit_bytes is not None and self.least_bytes(one) > self.limit_bytes,
            self.evaluate,
            self.priority,
        )

    def priority(self, one: Candidate) -> int:
        """Return when a candidate is tried.

        In steps of four times the effort, and last what is likely too large.
        What takes little finds the times soon that spare the search most of what takes long.
        """
        effort = bounds.effort(one, self.model(one.micro_batch_size).load)
        return ceil(log(max(effort, EFFORT) / EFFORT, 4)) + 100 * self.is_unlikely(one)

    def least_bytes(self, one: Candidate, held: Sequence[float] = ()) -> int:
        """Return bytes below which a candidate's fullest rank cannot be.

        `held` are micro-batches in flight by rank.
        """
        return bounds.least_bytes(one, self.model(one.micro_batch_size).load, held)

    def estimated_bytes(self, one: Candidate) -> float:
        """Return about what a candidate's fullest rank holds."""
        return bounds.estimated_bytes(one, self.model(one.micro_batch_size).load)

    @property
    def _optimizer(self) -> Optimizer:
        return OPTIMIZERS[optimizer_name(self.spec)]

    def is_unlikely(self, one: Candidate) -> bool:
        """Return whether a candidate is estimated to be too large for its devices or a node's host memory."""
        if (
            self.limit_bytes is not None
            and self.estimated_bytes(one) > ESTIMATE_ERROR * self.limit_bytes
        ):
            return True
        on_host = bounds.estimated_host_bytes(one, self.model(one.micro_batch_size).load)
        return on_host > 0 and not fits_host(
            self.run_of(one), [round(on_host / ESTIMATE_ERROR)] * one.partitions
        )

    def run_of(self, one: Candidate, boundaries: tuple[int, ...] = ()) -> RunSpec:
        """Return the resolved run of a candidate and partition.

        Its costs are still to be taken from its profile.
        """
        spec = self.spec
        on_node = self.spec.cluster.gpus_per_node or self.spec.machine.ranks_per_node
        parallel = replace(
            spec.parallel,
            partitions=one.partitions,
            replicas=one.replicas,
            micro_batches=one.micro_batches,
            replications=one.micro_batches // one.parts,
            parts=one.parts,
            micro_batch_size=one.micro_batch_size,
            boundaries=None if one.schedule == CAPPED else list(boundaries) or None,
            gpus=None,
            strips=one.strips,
        )
        schedule = replace(
            spec.schedule,
            name=one.schedule,
            chunks=one.chunks if one.chunks > 1 else spec.schedule.chunks,
            activation_cap=one.cap,
            activation_cap_bytes=None,
            path=None,
            memory_actions=[],
        )
        if one.schedule == CAPPED:
            schedule = replace(schedule, budget_s=min(schedule.budget_s, SEARCH_BUDGET_S))
        how = one.how or spec.memory.recompute
        memory = replace(
            spec.memory, name=one.memory, recompute=how, offload_inputs=False
        )  # not among the candidates
        if one.memory == "plan":
            memory = replace(memory, budget_s=min(memory.budget_s, PLAN_BUDGET_S))
        cost = replace(spec.cost, name=PROFILE, activation_bytes=0)
        cluster = replace(spec.cluster, ranks_per_node=on_node or None)
        return replace(
            spec, parallel=parallel, schedule=schedule, memory=memory, cost=cost, cluster=cluster
        )

    def changes(self, one: Candidate) -> tuple[str, ...]:
        """Return what a candidate's run has otherwise than the planner's spec, beside its own overrides."""
        run = self.run_of(one)
        own = {word.partition("=")[0] for word in one.overrides()}
        names = (*CHANGED, "parallel.boundaries") if one.schedule == CAPPED else CHANGED
        values = ((name, attrgetter(name)(run)) for name in names if name not in own)
        words = ((name, value) for name, value in values if value != attrgetter(name)(self.spec))
        return tuple(f"{name}={json.dumps(value)}" for name, value in words)

    def evaluate(self, one: Candidate, worst_s: float = inf) -> Choice | TooLarge | TooSlow | None:
        """Partition, schedule and simulate a candidate, unless it is plain that its score is above `worst_s`.

        None where its counts, or a policy where keeping fits, make no sense.
        """
        try:
            if one.memory != KEEP:
                if one.kept not in self._fits:
                    self.evaluate(one.kept, worst_s)
                if self._fits.get(one.kept):
                    return None
            else:
                self._fits[one] = False
                if self.limit_bytes is not None and self.least_bytes(one) > self.limit_bytes:
                    return TooLarge(self.least_bytes(one))
            partitions = self._not_slower(one, worst_s)
            if partitions is None:
                self._fits.pop(one, None)
                return TooSlow()
            if one.memory != KEEP:
                return self._under_policy(one, partitions)
            choice = self._keeping(one, partitions)
            self._fits[one] = isinstance(choice, Choice)
            return choice
        except ConfigError:
            return None

    @cached_property
    def _fits(self) -> dict[Candidate, bool]:
        """Which candidates that keep their activations fit: no policy is faster than that."""
        return {}

    def _not_slower(self, one: Candidate, worst_s: float) -> Iterable[_Scheduled] | None:
        """Return a candidate by its partitions, None if all of them score above `worst_s`.

        On free links, with everything kept, no list takes longer than as it runs.
        """
        partitions = self._scheduled(one)
        slower = []
        if worst_s == inf or one.schedule == CAPPED:
            return partitions
        for made in partitions:
            slower.append(made)
            if self.score(one, self._compute_s(one, made)) * (1 - ROUNDING) <= worst_s:
                return chain(slower, partitions)
        return None

    def _compute_s(self, one: Candidate, made: _Scheduled) -> float:
        """Return the seconds of a step without messages, which are the same under every memory policy."""
        key = one.kept, made.boundaries
        if key not in self._computed_s:
            self._computed_s[key] = simulate(made.compute, self._stage_costs(one, made)).span
        return self._computed_s[key]

    @cached_property
    def _computed_s(self) -> dict[tuple[Candidate, tuple[int, ...]], float]:
        return {}

    def _stage_costs(self, one: Candidate, made: _Scheduled) -> StageCosts:
        if made.run.machine.kind != "real":  # no real layers: the machine's own costs
            return schedule_costs(made.run, made.compute.placement)
        spans = self.model(one.micro_batch_size).spans
        return stage_costs(spans, made.boundaries)

    def _keeping(self, one: Candidate, partitions: Iterable[_Scheduled]) -> Choice | TooLarge:
        limit = self.limit_bytes or sys.maxsize
        least = sys.maxsize
        for made in partitions:
            at_least = self.least_bytes(one, bounds.held_at_once(made.compute))
            if at_least > limit:
                return TooLarge(at_least)
            peaks = self._peak_bytes(one, made)
            least = min(least, max(peaks))
            if max(peaks) <= limit:
                if made.is_by_bytes:
                    made, peaks = self._faster(one, made, peaks, limit)
                peak_bytes = partial(self._peak_bytes, one, made)
                schedule, peaks = lowered_within(
                    made.run, made.compute, peak_bytes, self.limit_bytes
                )
                network, step = simulate_step(made.run, schedule)
                costs = schedule_costs(made.run, schedule.placement)
                pace = replica_pace(made.run, 0)
                split = partial(parts_s, schedule, costs, links=network, pace=pace)
                jitter = partial(
                    with_jitter, made.run, schedule, costs, network, activation_cap(made.run)
                )
                return self._choice(one, made, step, peaks, (0,) * len(peaks), split, jitter)
        return TooLarge(least)

    def _peak_bytes(
        self, one: Candidate, made: _Scheduled, schedule: Schedule | None = None
    ) -> tuple[int, ...]:
        model = MemoryModel(self.model(one.micro_batch_size).spans, self._optimizer)
        return model.peak_bytes(schedule or lower(made.compute), made.boundaries)

    def _faster(
        self, one: Candidate, made: _Scheduled, peaks: tuple[int, ...], limit: int
    ) -> tuple[_Scheduled, tuple[int, ...]]:
        """Return the exact partition within the bytes in place of that by bytes, if it can be had and keeps them."""
        model = self.model(one.micro_batch_size)
        boundaries = model.within(lower(made.compute), optimizer_name(self.spec), limit)
        if boundaries is None:
            return made, peaks
        other = self._scheduled_at(one, boundaries)
        others = self._peak_bytes(one, other)
        return (other, others) if max(others) <= limit and _keeps_cap(other) else (made, peaks)

    def _under_policy(self, one: Candidate, partitions: Iterable[_Scheduled]) -> Choice | TooLarge:
        limit = self.limit_bytes or sys.maxsize
        least = sys.maxsize
        model = self.model(one.micro_batch_size)
        for made in partitions:
            run = made.run
            case = memory_case(run, made.compute, made.boundaries, model.profile)
            case = replace(case, limit_bytes=run.memory.limit_bytes or self.limit_bytes)
            try:
                plan = replace(plan_within(run.memory, case), least_bytes=case.least_bytes)
            except DoesNotFitError as error:
                least = min(least, error.needed_bytes)
                continue
            schedule = case.lowered(plan)
            timelines = []
            for rank in range(schedule.num_ranks):
                timelines.append(
                    rank_timeline(model.profile, plan, schedule, rank, self._optimizer)
                )
                if timelines[-1].peak_bytes > limit:
                    break
            peaks = tuple(each.peak_bytes for each in timelines)
            on_host = tuple(each.peak_host_bytes for each in timelines)
            if max(peaks) > limit:
                least = min(least, max(peaks))
            elif fits_host(run, on_host):
                rates = run.machine.d2h_bytes_per_s, run.machine.h2d_bytes_per_s
                costs = segment_costs(model.profile, plan, schedule, *rates)
                step = simulate(schedule, costs, case.network)
                found = case.as_run(
                    PlanOutcome(plan, schedule, costs, tuple(timelines), step, case.network)
                )
                split = partial(parts_s, found.schedule, found.costs, links=found.network)
                jitter = partial(with_jitter, run, found.schedule, found.costs, found.network, None)
                return self._choice(
                    one, made, found.simulation, found.peak_bytes, on_host, split, jitter
                )
        return TooLarge(least)

    def _scheduled(self, one: Candidate) -> Iterator[_Scheduled]:
        """Yield the candidate by its partition of least time, and if another is asked for, by that of least bytes."""
        if one.schedule == CAPPED:
            run = self.run_of(one)
            profile = self.model(one.micro_batch_size).profile
            found = search_schedule(run, profile)
            run = replace(
                run,
                cost=profiled_costs(
                    run, profile, found["boundaries"], unit_bytes=found["unit_bytes"]
                ),
            )
            yield _Scheduled(tuple(found["boundaries"]), run, found=from_json(found["schedule"]))
            return
        made = self._scheduled_at(one, self._by_time(one)[0])
        if _keeps_cap(made):
            yield made
        elif self.limit_bytes is None or one.num_stages == 1:
            raise ConfigError(
                "schedule.activation_cap", one.cap, f"is less than {one.schedule} holds"
            )
        if self.limit_bytes is None or one.num_stages == 1:
            return
        # what is recomputed is there for one micro-batch at a time
        counts = stashes(made.compute) if one.memory == KEEP else (1,) * one.num_stages
        boundaries = self.model(one.micro_batch_size).by_bytes(counts)
        other = replace(self._scheduled_at(one, boundaries), is_by_bytes=True)
        if boundaries != made.boundaries and _keeps_cap(other):
            yield other

    def _scheduled_at(self, one: Candidate, boundaries: tuple[int, ...]) -> _Scheduled:
        spans = self.model(one.micro_batch_size).spans
        run = self.run_of(one, boundaries)
        return _Scheduled(
            boundaries, replace(run, cost=profiled_costs(run, spans.profile, boundaries))
        )

    def _choice(
        self,
        one: Candidate,
        made: _Scheduled,
        step: Simulation,
        peaks: tuple[int, ...],
        on_host: tuple[int, ...],
        split: Callable[[Simulation], Mapping[str, float]],
        jitter: Callable[[Simulation], tuple[Simulation, Span]],
    ) -> Choice:
        score_s = self.score(one, step.span)
        epochs = None if self.epochs is None else self.epochs(one.global_batch)
        changes = self.changes(one)
        return Choice(
            one,
            made.boundaries,
            step.span,
            score_s,
            step.efficiency,
            peaks,
            on_host,
            partial(split, step),
            lambda: self._choice(one, made, jitter(step)[0], peaks, on_host, split, jitter),
            epochs,
            changes,
        )

    def with_noise(self, choice: Choice) -> Choice:
        """Return a choice by the median of its steps under machine.noise, which would take too long for all."""
        return (
            replace(choice.noisy(), noisy=None)
            if self.spec.machine.noise and choice.noisy
            else choice
        )

    def score(self, one: Candidate, step_s: float) -> float:
        """Return what a candidate is ranked by: seconds of a step, or of all steps to the target."""
        if self.epochs is None:
            return step_s
        return (
            step_s * self.epochs(one.global_batch) * self.spec.data.train_samples / one.global_batch
        )

    def _refined_s(self, one: Candidate) -> float:
        bottleneck_s = 0.0 if one.schedule == CAPPED else self._by_time(one)[1]
        return bounds.least_step_s(one, self.model(one.micro_batch_size).load, bottleneck_s)

    def _by_time(
        self, one: Candidate, placement: Placement | None = None
    ) -> tuple[tuple[int, ...], float]:
        """Return the partition of least time, that of the smallest micro-batch.

        Layers' times grow nearly alike.
        For another size the seconds of the heaviest rank are bounded by the layer that grows least.
        """
        placement = placement or one.family.place(one.partitions, one.chunks)
        smallest = self.model(self.sizes[0])
        boundaries, bottleneck_s = smallest.by_time(placement)
        if one.micro_batch_size == self.sizes[0]:
            return boundaries, bottleneck_s
        pairs = zip(
            self.model(one.micro_batch_size).profile.layers, smallest.profile.layers, strict=True
        )
        grows = min(
            (layer.time_s / base.time_s for layer, base in pairs if base.time_s), default=0.0
        )
        return boundaries, grows * bottleneck_s

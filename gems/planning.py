"""Planning: what a candidate configuration takes, from its profile, its cut, its very list and its simulation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from gems.config import RunSpec
from gems.costed import PROFILE, costs_from
from gems.cutting import optimizer_of
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.case import Outcome
from gems.memory.model import MESSAGE_COPIES, OPTIMIZERS, MemoryModel
from gems.memory.segment_costs import stage_costs
from gems.candidate_cuts import Cuts, with_stages
from gems.plan.search.best_first import Rules, TooLarge
from gems.plan.search.bounds import Load, least_bytes, least_step_s, load_of
from gems.plan.search.candidate import CAPPED, KEEP, Candidate
from gems.plan.search.choice import Choice
from gems.planned import check_fits, memory_case
from gems.policies import plan_of
from gems.profile import ModelProfile
from gems.profile.scaling import extrapolate
from gems.profile.store import profile_of
from gems.program import all_reduce, compute_schedule_of, costs_of, network_in_seconds
from gems.schedule.costs import Network, StageCosts
from gems.schedule.lower import lower
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.schedule.waits import rank_times

PROFILED_SIZES = (1, 2)  # micro-batches of other sizes follow from these
PLAN_BUDGET_S = 3.0  # of memory=plan, which has many candidates to plan for
SECONDS = {"unit_s": 1.0, "link": 0.0}
Epochs = Callable[[int], float]


@dataclass(frozen=True)
class Planner:
    """Judges candidates for a run: `spec` is the resolved one that says everything that no candidate chooses.

    `epochs` gives the epochs to the target by global batch, where they are known: then choices are ranked by the seconds to it.
    """

    spec: RunSpec
    limit_bytes: int | None
    epochs: Epochs | None = None

    @cached_property
    def _made(self) -> dict[object, object]:
        return {}

    def rules(self) -> Rules[Candidate, Choice]:
        """Gives how the search judges candidates: by seconds of a step, or to the target."""
        return Rules(
            lambda one: self._scored(one, least_step_s(one, self.load(one.micro_batch_size))),
            lambda one: self._scored(one, self._refined_s(one)),
            lambda one: self.limit_bytes is not None and self.least_bytes(one) > self.limit_bytes,
            self.evaluate,
            lambda one: one.is_slow,
        )

    def least_bytes(self, one: Candidate) -> int:
        """Gives bytes below which a candidate's fullest rank cannot be."""
        copies = OPTIMIZERS[optimizer_of(self.spec)].copies
        return least_bytes(one, self.load(one.micro_batch_size), copies, MESSAGE_COPIES)

    def profile(self, size: int) -> ModelProfile:
        """Gives the profile of a micro-batch size; beyond two images it follows from those of one and two.

        Raises:
            ConfigError: a profile that cannot be had.
        """
        made = self._made
        if ("profile", size) not in made:
            if size in PROFILED_SIZES or self.spec.profile.path is not None:
                parallel = replace(self.spec.parallel, micro_batch_size=size)
                made["profile", size] = profile_of(replace(self.spec, parallel=parallel))
            else:
                points = [self.profile(each) for each in PROFILED_SIZES]
                data = self.spec.data
                made["profile", size] = extrapolate(points, data.height_px, data.width_px, size)
        found = made["profile", size]
        assert isinstance(found, ModelProfile)
        return found

    def load(self, size: int) -> Load:
        """Gives the load of a micro-batch size, for the bounds."""
        made = self._made
        if ("load", size) not in made:
            made["load", size] = load_of(self.profile(size))
        found = made["load", size]
        assert isinstance(found, Load)
        return found

    def cuts(self, size: int) -> Cuts:
        """Gives the cuts of a micro-batch size."""
        made = self._made
        if ("cuts", size) not in made:
            made["cuts", size] = Cuts(self.profile(size))
        found = made["cuts", size]
        assert isinstance(found, Cuts)
        return found

    def run_of(self, one: Candidate, boundaries: tuple[int, ...] = ()) -> RunSpec:
        """Gives the resolved run of a candidate, with its cut; its costs are still to be taken from its profile."""
        spec, on_node = self.spec, self.spec.cluster.gpus_per_node or self.spec.machine.ranks_per_node
        parallel = replace(
            spec.parallel, partitions=one.partitions, replicas=one.replicas, micro_batches=one.micro_batches,
            replications=one.micro_batches // one.parts, parts=one.parts, micro_batch_size=one.micro_batch_size,
            boundaries=list(boundaries) or None, gpus=None,
        )  # fmt: skip
        schedule = replace(
            spec.schedule, name=one.schedule, chunks=one.chunks if one.chunks > 1 else spec.schedule.chunks,
            activation_cap=one.cap, activation_cap_bytes=None, path=None, allow=[],
        )  # fmt: skip
        memory = replace(spec.memory, name=one.memory, recompute=one.how or spec.memory.recompute)
        if one.memory == "plan":
            memory = replace(memory, budget_s=min(memory.budget_s, PLAN_BUDGET_S))
        cost = replace(spec.cost, name=PROFILE, activation_bytes=0)
        ranks_per_node = min(on_node, spec.world_size) if on_node else None
        cluster = replace(spec.cluster, ranks_per_node=ranks_per_node)
        return replace(
            spec, parallel=parallel, schedule=schedule, memory=memory, cost=cost, cluster=cluster
        )

    def evaluate(self, one: Candidate) -> Choice | TooLarge | None:
        """Cuts, schedules and simulates a candidate; None where its counts, or a policy where keeping fits, make no sense."""
        if one.memory != KEEP and isinstance(self._kept(one.kept), Choice):
            return None
        try:
            return self._kept(one) if one.memory == KEEP else self._under_policy(one)
        except ConfigError:
            return None

    def _kept(self, one: Candidate) -> Choice | TooLarge | None:
        """Evaluates a candidate that keeps its activations, once."""
        made = self._made
        if one not in made:
            if self.limit_bytes is not None and self.least_bytes(one) > self.limit_bytes:
                made[one] = TooLarge(self.least_bytes(one))
            else:
                try:
                    made[one] = self._keeping(one)
                except ConfigError:
                    made[one] = None
        found = made[one]
        assert found is None or isinstance(found, Choice | TooLarge)
        return found

    def _keeping(self, one: Candidate) -> Choice | TooLarge:
        cuts, optimizer = self.cuts(one.micro_batch_size), optimizer_of(self.spec)
        model = MemoryModel(cuts.spans, OPTIMIZERS[optimizer])
        least = sys.maxsize
        for boundaries, run, compute in self._scheduled(one):
            schedule = lower(compute)
            peaks = model.peak_bytes(schedule, boundaries)
            least = min(least, max(peaks))
            if self.limit_bytes is None or max(peaks) <= self.limit_bytes:
                costs = self._costs(run, schedule, boundaries)
                return self._played(one, run, boundaries, schedule, costs, peaks, (0,) * len(peaks))
        return TooLarge(least)

    def _under_policy(self, one: Candidate) -> Choice | TooLarge | None:
        least = sys.maxsize
        for boundaries, run, compute in self._scheduled(one):
            case = replace(
                memory_case(run, compute, boundaries, self.profile(one.micro_batch_size)),
                limit_bytes=run.memory.limit_bytes or self.limit_bytes,
            )
            try:
                outcome = case.outcome(plan_of(run.memory, case))
                check_fits(run, outcome)
            except DoesNotFitError as error:
                least = min(least, error.needed_bytes)
                continue
            return self._choice_of(one, run, boundaries, outcome)
        return TooLarge(least)

    def _choice_of(
        self, one: Candidate, run: RunSpec, boundaries: tuple[int, ...], outcome: Outcome
    ) -> Choice:
        schedule, made = outcome.schedule, outcome.costs
        costs = replace(made, reduce=self._reduce_s(run, schedule.placement, boundaries))
        return self._played(one, run, boundaries, schedule, costs, outcome.peak_bytes, outcome.host_bytes)

    def _scheduled(self, one: Candidate) -> Iterator[tuple[tuple[int, ...], RunSpec, Schedule]]:
        """Gives the candidate's cuts, each with the run and its compute-only list, as long as another one is asked for."""
        cuts, profile = self.cuts(one.micro_batch_size), self.profile(one.micro_batch_size)
        run = self.run_of(one)
        if one.schedule == CAPPED:
            layers = list(range(profile.num_layers + 1))
            schedule = replace(run.schedule, max_stages=profile.num_layers)
            run = replace(run, cost=costs_from(run, profile, layers), schedule=schedule)
            compute = compute_schedule_of(run)
            chain = with_stages(one, compute.num_stages)
            yield cuts.by_time(chain).boundaries, run, compute
            return
        boundaries = cuts.by_time(one).boundaries
        run, compute = self._scheduled_at(one, boundaries)
        yield boundaries, run, compute
        if self.limit_bytes is None:
            return
        for other in cuts.within(lower(compute), optimizer_of(self.spec), self.limit_bytes):
            if other != boundaries:
                yield other, *self._scheduled_at(one, other)

    def _scheduled_at(self, one: Candidate, boundaries: tuple[int, ...]) -> tuple[RunSpec, Schedule]:
        spans, run = self.cuts(one.micro_batch_size).spans, self.run_of(one, boundaries)
        kept = list(stage_costs(spans, boundaries).activation)
        run = replace(run, cost=costs_from(run, spans.profile, boundaries, kept))
        return run, compute_schedule_of(run)

    def _costs(self, run: RunSpec, schedule: Schedule, boundaries: tuple[int, ...]) -> StageCosts:
        """Gives what the list is simulated with: the profile's seconds, or on a machine without real layers its own costs."""
        if run.machine.kind != "real":
            return costs_of(run, schedule.placement)
        spans = self.cuts(run.parallel.micro_batch_size).spans
        reduce_s = self._reduce_s(run, schedule.placement, boundaries)
        return replace(stage_costs(spans, boundaries), reduce=reduce_s)

    def _reduce_s(
        self, run: RunSpec, placement: Placement, boundaries: tuple[int, ...]
    ) -> tuple[float, ...]:
        params = self.cuts(run.parallel.micro_batch_size).spans.params
        in_seconds = replace(run, cost=replace(run.cost, **SECONDS))  # type: ignore[arg-type]
        found = [0.0] * placement.num_stages
        for rank in range(placement.num_ranks):
            stages = {stage for _, stage in placement.stages_on(rank)}
            num_bytes = sum(float(params[boundaries[stage], boundaries[stage + 1]]) for stage in stages)
            group = placement.reduce_group(rank, run.parallel.replicas)
            found[placement.lowest_stage(rank)] = all_reduce(in_seconds, group, round(num_bytes))
        return tuple(found)

    def _played(
        self, one: Candidate, run: RunSpec, boundaries: tuple[int, ...], schedule: Schedule, costs: StageCosts,
        peaks: tuple[int, ...], on_host: tuple[int, ...],
    ) -> Choice:  # fmt: skip
        network, played = _slowest(run, schedule, costs)
        times = rank_times(schedule, costs, played, network)
        parts_s = {
            "compute": fmean(time.useful for time in times),
            "recompute": fmean(time.recompute for time in times),
            "messages": fmean(time.link for time in times),
            "all_reduce": fmean(time.reduce for time in times),
            "waiting": fmean(time.idle + time.step for time in times),
        }
        epochs = None if self.epochs is None else self.epochs(one.global_batch)
        return Choice(
            one, boundaries, played.span, self._scored(one, played.span), played.efficiency, peaks, on_host, parts_s, epochs,
        )  # fmt: skip

    def _scored(self, one: Candidate, step_s: float) -> float:
        """Gives what a candidate is ranked by: seconds of a step, or of all steps to the target."""
        if self.epochs is None:
            return step_s
        return step_s * self.epochs(one.global_batch) * self.spec.data.train_images / one.global_batch

    def _refined_s(self, one: Candidate) -> float:
        load = self.load(one.micro_batch_size)
        if one.schedule == CAPPED:
            return least_step_s(one, load)
        return least_step_s(one, load, self.cuts(one.micro_batch_size).by_time(one).bottleneck_s)


def _slowest(run: RunSpec, schedule: Schedule, costs: StageCosts) -> tuple[Network, Simulation]:
    """Simulates a pipeline as it lies over the nodes, the slowest way of its replicas, which are alike but for that."""
    network, size = network_in_seconds(run), schedule.num_ranks
    per_node = network.ranks_per_node or sys.maxsize
    ways: dict[tuple[int, ...], int] = {}
    for first in sorted({replica * size % per_node for replica in range(run.parallel.replicas)}):
        nodes = tuple((first + rank) // per_node for rank in range(size))
        ways.setdefault(nodes, first)
    networks = [replace(network, first_rank=first) for first in ways.values()]
    return max(((each, simulate(schedule, costs, each)) for each in networks), key=lambda pair: pair[1].span)

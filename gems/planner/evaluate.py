"""Planning: what a candidate configuration takes, from its profile, its cut, its very list and its simulation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.model import OPTIMIZERS, MemoryModel
from gems.memory.registry import plan_within
from gems.memory.timeline import RankTimeline, rank_timeline, segment_costs, stage_costs
from gems.partition.methods import optimizer_name
from gems.planner.candidate_partitions import Cuts, TimeCut, stashes, with_stages
from gems.planner.search.best_first import Rules, TooLarge
from gems.planner.search.bounds import (
    Load,
    guess_bytes,
    guess_host_bytes,
    held_at_once,
    least_bytes,
    least_step_s,
    load_of,
)
from gems.planner.search.candidate import KEEP, Candidate
from gems.planner.search.choice import Choice
from gems.profile import ModelProfile
from gems.profile.scaling import extrapolate
from gems.profile.store import profile_of
from gems.schedule import CAPPED
from gems.schedule.costs import StageCosts
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.simulation.build import compute_schedule
from gems.simulation.costs import (
    even_paces,
    network_in_seconds,
    parts_s,
    schedule_costs,
    slowest_replica,
    with_all_reduce,
)
from gems.simulation.memory_case import fits_host, memory_case
from gems.simulation.profiled_costs import PROFILE, profiled_costs

GUESSED = 1.25  # times the limit, up to which a guess of the bytes may well fit
PROFILED_SIZES = (1, 2)  # micro-batches of other sizes follow from these
PLAN_BUDGET_S, SEARCH_BUDGET_S = (3.0, 1.0)  # of memory=plan and schedule=capped, of which there are many candidates
Epochs = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class _Made:
    """A candidate with a cut: its run and its compute-only list; `is_by_bytes` says by which of the two cuts."""

    boundaries: tuple[int, ...]
    run: RunSpec
    compute: Schedule
    is_by_bytes: bool = False


@dataclass(frozen=True)
class Planner:
    """Judges candidates for a run: `spec` is the resolved one that says everything that no candidate chooses.

    `epochs` gives the epochs to the target by global batch, where they are known: then choices are ranked by the
    seconds to it. `_made` holds profiles, loads and cuts, which do not depend on the limit.
    """

    spec: RunSpec
    limit_bytes: int | None
    epochs: Epochs | None = None
    _made: dict[object, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes whose profiles are taken; of a profile that was given, its own."""
        given = self.spec.profile.path is not None
        return (self.spec.parallel.micro_batch_size,) if given else PROFILED_SIZES

    def rules(self) -> Rules[Candidate, Choice]:
        """Return how the search judges candidates: by seconds of a step, or to the target."""
        return Rules(
            lambda one: self._scored(one, least_step_s(one, self.load(one.micro_batch_size))),
            lambda one: self._scored(one, self._refined_s(one)),
            lambda one: self.limit_bytes is not None and self.least_bytes(one) > self.limit_bytes,
            self.evaluate,
            self._turn,
        )

    def least_bytes(self, one: Candidate, held: Sequence[float] = ()) -> int:
        """Return bytes below which a candidate's fullest rank cannot be; `held` are micro-batches in flight by rank."""
        return least_bytes(one, self.load(one.micro_batch_size), held)

    def guess_bytes(self, one: Candidate) -> float:
        """Return about what a candidate's fullest rank holds."""
        return guess_bytes(one, self.load(one.micro_batch_size))

    def _turn(self, one: Candidate) -> int:
        """Return the candidate's turn; of those that take long, what is likely too large comes behind the others."""
        return 2 * one.turn + (one.turn > 1 and self.is_unlikely(one))

    def is_unlikely(self, one: Candidate) -> bool:
        """Return whether a candidate's guessed bytes are too many for its devices or a node's host memory."""
        if self.limit_bytes is not None and self.guess_bytes(one) > GUESSED * self.limit_bytes:
            return True
        on_host = guess_host_bytes(one, self.load(one.micro_batch_size))
        return on_host > 0 and not fits_host(self.run_of(one), [round(on_host / GUESSED)] * one.partitions)

    def profile(self, size: int) -> ModelProfile:
        """Return the profile of a micro-batch size; beyond two images it follows from those of one and two.

        Raises:
            ConfigError: a profile that cannot be had.
        """
        made = self._made
        if ("profile", size) not in made:
            if size in self.sizes:
                parallel = replace(self.spec.parallel, micro_batch_size=size)
                made["profile", size] = profile_of(replace(self.spec, parallel=parallel))
            else:
                points = [self.profile(each) for each in self.sizes]
                data = self.spec.data
                made["profile", size] = extrapolate(points, data.height_px, data.width_px, size)
        found = made["profile", size]
        assert isinstance(found, ModelProfile)
        return found

    def load(self, size: int) -> Load:
        """Return the load of a micro-batch size, for the bounds."""
        made = self._made
        if ("load", size) not in made:
            made["load", size] = load_of(self.profile(size), OPTIMIZERS[optimizer_name(self.spec)])
        found = made["load", size]
        assert isinstance(found, Load)
        return found

    def cuts(self, size: int) -> Cuts:
        """Return the cuts of a micro-batch size."""
        made = self._made
        if ("cuts", size) not in made:
            made["cuts", size] = Cuts(self.profile(size))
        found = made["cuts", size]
        assert isinstance(found, Cuts)
        return found

    def run_of(self, one: Candidate, boundaries: tuple[int, ...] = ()) -> RunSpec:
        """Return the resolved run of a candidate, with its cut; its costs are still to be taken from its profile."""
        spec, on_node = self.spec, self.spec.cluster.gpus_per_node or self.spec.machine.ranks_per_node
        parallel = replace(
            spec.parallel, partitions=one.partitions, replicas=one.replicas, micro_batches=one.micro_batches,
            replications=one.micro_batches // one.parts, parts=one.parts, micro_batch_size=one.micro_batch_size,
            boundaries=list(boundaries) or None, gpus=None,
        )  # fmt: skip
        schedule = replace(
            spec.schedule, name=one.schedule, chunks=one.chunks if one.chunks > 1 else spec.schedule.chunks,
            activation_cap=one.cap, activation_cap_bytes=None, path=None, memory_actions=[],
        )  # fmt: skip
        if one.schedule == CAPPED:
            schedule = replace(schedule, budget_s=min(schedule.budget_s, SEARCH_BUDGET_S))
        memory = replace(spec.memory, name=one.memory, recompute=one.how or spec.memory.recompute)
        if one.memory == "plan":
            memory = replace(memory, budget_s=min(memory.budget_s, PLAN_BUDGET_S))
        cost = replace(spec.cost, name=PROFILE, activation_bytes=0)
        cluster = replace(spec.cluster, ranks_per_node=on_node or None)
        return replace(spec, parallel=parallel, schedule=schedule, memory=memory, cost=cost, cluster=cluster)

    def evaluate(self, one: Candidate) -> Choice | TooLarge | None:
        """Cut, schedules and simulates a candidate.

        None where its counts, or a policy where keeping fits, make no sense.
        """
        if one.memory == KEEP:
            found = self._kept(one)
            self._fits[one] = isinstance(found, Choice)
            return found
        if one.kept not in self._fits:
            self._fits[one.kept] = isinstance(self._kept(one.kept), Choice)
        try:
            return None if self._fits[one.kept] else self._under_policy(one)
        except ConfigError:
            return None

    @cached_property
    def _fits(self) -> dict[Candidate, bool]:
        """Which candidates that keep their activations fit: no policy is faster than that."""
        return {}

    def _kept(self, one: Candidate) -> Choice | TooLarge | None:
        if self.limit_bytes is not None and self.least_bytes(one) > self.limit_bytes:
            return TooLarge(self.least_bytes(one))
        try:
            return self._keeping(one)
        except ConfigError:
            return None

    def _keeping(self, one: Candidate) -> Choice | TooLarge:
        least = sys.maxsize
        for made in self._scheduled(one):
            at_least = self.least_bytes(one, held_at_once(made.compute))
            if self.limit_bytes is not None and at_least > self.limit_bytes:
                return TooLarge(at_least)
            peaks = self._peaks(made)
            least = min(least, max(peaks))
            if self.limit_bytes is None or max(peaks) <= self.limit_bytes:
                if made.is_by_bytes:
                    made, peaks = self._faster(one, made, peaks)
                schedule = lower(made.compute)
                costs = self._costs(made.run, schedule, made.boundaries)
                return self._played(one, made, schedule, costs, peaks, (0,) * len(peaks))
        return TooLarge(least)

    def _peaks(self, made: _Made) -> tuple[int, ...]:
        spans, optimizer = self.cuts(made.run.parallel.micro_batch_size).spans, optimizer_name(self.spec)
        model = MemoryModel(spans, OPTIMIZERS[optimizer])
        return model.peak_bytes(lower(made.compute), made.boundaries)

    def _faster(self, one: Candidate, made: _Made, peaks: tuple[int, ...]) -> tuple[_Made, tuple[int, ...]]:
        """Return the exact cut within the bytes, where it can be had and keeps them.

        It takes the place of the cut by bytes, which is returned otherwise.
        """
        assert self.limit_bytes is not None
        cuts = self.cuts(one.micro_batch_size)
        boundaries = cuts.within(lower(made.compute), optimizer_name(self.spec), self.limit_bytes)
        if boundaries is None:
            return made, peaks
        other = self._scheduled_at(one, boundaries)
        others = self._peaks(other)
        return (other, others) if max(others) <= self.limit_bytes else (made, peaks)

    def _under_policy(self, one: Candidate) -> Choice | TooLarge:
        least = sys.maxsize
        for made in self._scheduled(one):
            run, profile = made.run, self.profile(one.micro_batch_size)
            case = memory_case(run, made.compute, made.boundaries, profile)
            case = replace(case, limit_bytes=run.memory.limit_bytes or self.limit_bytes)
            try:
                plan = replace(plan_within(run.memory, case), least_bytes=case.least_bytes)
            except DoesNotFitError as error:
                least = min(least, error.needed_bytes)
                continue
            schedule = case.lowered(plan)
            walked: list[RankTimeline] = []
            for rank in range(schedule.num_ranks):
                walked.append(rank_timeline(profile, plan, schedule, rank, OPTIMIZERS[case.optimizer]))
                if self.limit_bytes is not None and walked[-1].peak_bytes > self.limit_bytes:
                    break
            peaks = tuple(each.peak_bytes for each in walked)
            on_host = tuple(each.peak_host_bytes for each in walked)
            if self.limit_bytes is not None and max(peaks) > self.limit_bytes:
                least = min(least, max(peaks))
                continue
            if fits_host(run, on_host):
                rates = run.machine.d2h_bytes_per_s, run.machine.h2d_bytes_per_s
                spans = self.cuts(one.micro_batch_size).spans
                costs = segment_costs(profile, plan, schedule, *rates)
                costs = with_all_reduce(run, costs, schedule.placement, made.boundaries, spans)
                return self._played(one, made, schedule, costs, peaks, on_host)
        return TooLarge(least)

    def _scheduled(self, one: Candidate) -> Iterator[_Made]:
        """Yield the candidate by its cut of least time.

        As long as another one is asked for, yield it by its cut of least bytes.
        """
        cuts, profile = self.cuts(one.micro_batch_size), self.profile(one.micro_batch_size)
        if one.schedule == CAPPED:
            run = self.run_of(one)
            layers = list(range(profile.num_layers + 1))
            schedule = replace(run.schedule, max_stages=profile.num_layers)
            run = replace(run, cost=profiled_costs(run, profile, layers), schedule=schedule)
            compute = compute_schedule(run)
            chain = with_stages(one, compute.num_stages)
            yield _Made(self._by_time(chain).boundaries, run, compute)
            return
        made = self._scheduled_at(one, self._by_time(one).boundaries)
        yield made
        if self.limit_bytes is None or one.num_stages == 1:
            return
        # what is made again is there for one micro-batch at a time
        counts = stashes(made.compute) if one.memory == KEEP else (1,) * made.compute.num_stages
        boundaries = cuts.by_bytes(counts)
        if boundaries != made.boundaries:
            yield replace(self._scheduled_at(one, boundaries), is_by_bytes=True)

    def _scheduled_at(self, one: Candidate, boundaries: tuple[int, ...]) -> _Made:
        spans, run = self.cuts(one.micro_batch_size).spans, self.run_of(one, boundaries)
        kept = list(stage_costs(spans, boundaries).activation)
        run = replace(run, cost=profiled_costs(run, spans.profile, boundaries, kept))
        return _Made(boundaries, run, compute_schedule(run))

    def _costs(self, run: RunSpec, schedule: Schedule, boundaries: tuple[int, ...]) -> StageCosts:
        """Return what the list is simulated with.

        The profile's seconds, or on a machine without real layers its own costs.
        """
        if run.machine.kind != "real":
            return schedule_costs(run, schedule.placement)
        spans = self.cuts(run.parallel.micro_batch_size).spans
        return with_all_reduce(run, stage_costs(spans, boundaries), schedule.placement, boundaries, spans)

    def _played(
        self,
        one: Candidate,
        made: _Made,
        schedule: Schedule,
        costs: StageCosts,
        peaks: tuple[int, ...],
        on_host: tuple[int, ...],
    ) -> Choice:
        run = made.run
        network, played = slowest_replica(schedule, costs, network_in_seconds(run), even_paces(run))
        epochs = None if self.epochs is None else self.epochs(one.global_batch)
        return Choice(
            one, made.boundaries, played.span, self._scored(one, played.span), played.efficiency, peaks, on_host,
            partial(parts_s, schedule, costs, played, network), epochs,
        )  # fmt: skip

    def _scored(self, one: Candidate, step_s: float) -> float:
        """Return what a candidate is ranked by: seconds of a step, or of all steps to the target."""
        if self.epochs is None:
            return step_s
        return step_s * self.epochs(one.global_batch) * self.spec.data.train_samples / one.global_batch

    def _refined_s(self, one: Candidate) -> float:
        load = self.load(one.micro_batch_size)
        if one.schedule == CAPPED:
            return least_step_s(one, load)
        return least_step_s(one, load, self._by_time(one).bottleneck_s)

    def _by_time(self, one: Candidate) -> TimeCut:
        """Return the cut by time, which is that of the smallest micro-batch for all: layers' times grow nearly alike.

        For another size the heaviest rank's seconds are bounded by the layer that grows least.
        """
        smallest = self.sizes[0]
        found = self.cuts(smallest).by_time(one)
        if one.micro_batch_size == smallest:
            return found
        pairs = zip(self.profile(one.micro_batch_size).layers, self.profile(smallest).layers, strict=True)
        grows = min((layer.time_s / base.time_s for layer, base in pairs if base.time_s), default=0.0)
        return replace(found, bottleneck_s=grows * found.bottleneck_s)

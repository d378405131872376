"""Evaluate candidates from the profile, the partition, the exact schedule and its simulation."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from math import ceil, inf, log
from operator import attrgetter

import numpy as np

from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.model import OPTIMIZERS, MemoryModel, Optimizer
from gems.partition.exact import solve
from gems.partition.methods import PartitionCase, optimizer_name
from gems.partition.problem import InfeasibleError, Problem
from gems.plan.draft import PROFILE, Draft
from gems.plan.evaluate import Plan, finish
from gems.profile import ModelProfile
from gems.profile.scaling import extrapolate
from gems.profile.spans import RankCosts, Spans
from gems.schedule.ledger import TOLERANCE, in_flight, peaks
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, looped
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.search import bounds
from gems.search.best_first import Rules, TooLarge, TooSlow
from gems.search.candidate import KEEP, Candidate
from gems.search.choice import Choice
from gems.simulation.costs import parts_s
from gems.simulation.memory_case import HOST, Room
from gems.simulation.prediction import with_jitter

ESTIMATE_ERROR = 1.25  # a candidate may still fit if its estimate is up to this times the limit
EFFORT = 128  # in actions; up to this, only the bounds order the candidates
ROUNDING = 1e-8  # of sums in another order, and of scores to nine digits
PROFILED_SIZES = (1, 2)  # profiles of other micro-batch sizes are extrapolated from these
# budgets of memory=plan and of searches for a schedule, short because of the many candidates
PLAN_BUDGET_S, SEARCH_BUDGET_S = (3.0, 1.0)
CHANGED = (
    "schedule.activation_cap",
    "schedule.activation_cap_bytes",
    "schedule.memory_actions",
    "schedule.budget_s",
    "memory.offload_inputs",
    "memory.budget_s",
    "parallel.strips",
)
CUT_BUDGET_S = 1.0  # for one partition
MAX_TABLE_BYTES = 2**29  # of the cost tables of a partition within a limit of bytes
Epochs = Callable[[int], float]


class ProfiledModel:
    """A model at one micro-batch size: its profile, inputs to the bounds, and partitions."""

    def __init__(self, profile: ModelProfile, optimizer: Optimizer) -> None:
        self.profile = profile
        self._optimizer = optimizer
        self.spans = Spans(profile)
        self.by_time = cache(self._by_time)
        self.by_bytes = cache(self._by_bytes)

    @cached_property
    def load(self) -> bounds.Load:
        """The load of one micro-batch, for the bounds."""
        return bounds.Load(self.profile, self._optimizer)

    def _by_time(self, placement: Placement) -> tuple[tuple[int, ...], float]:
        """Return the fastest partition, and a lower bound on its heaviest rank in seconds.

        The partition is exact if ranks hold one stage or a pair of stages. If ranks hold several
        chunks in a row, each stage is weighed by itself, and the bound is 0.
        """
        num_stages = placement.num_stages
        num_ranks = placement.num_ranks
        is_alone = num_stages > 2 * num_ranks or (
            num_stages > num_ranks and placement == looped(num_ranks, 2)
        )
        ranks = []
        for rank in range(num_stages if is_alone else num_ranks):
            stages = ((0, rank),) if is_alone else placement.stages_on(rank)
            counts = sorted(Counter(stage for _, stage in stages).items())
            shares = (count / placement.num_directions for _, count in counts)
            tables = tuple(partial(np.multiply, share, self.spans.time_s) for share in shares)
            ranks.append(RankCosts(tuple(stage for stage, _ in counts), (tables,)))
        best = solve(self._problem(num_stages, tuple(dict.fromkeys(ranks))), CUT_BUDGET_S)
        return best.boundaries, 0.0 if is_alone else best.cost if best.is_optimal else best.bound

    def _by_bytes(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the partition that balances the bytes of the stages.

        A stage holds the activations of one micro-batch as many times as `counts` says.
        """
        ranks = tuple(
            RankCosts((stage,), ((partial(np.multiply, float(count), self.spans.stash),),))
            for stage, count in enumerate(counts)
        )
        return solve(self._problem(len(counts), ranks)).boundaries

    def within(
        self, schedule: Schedule, optimizer: str, limit_bytes: int
    ) -> tuple[int, ...] | None:
        """Return the fastest exact partition within the limit of bytes, for a lowered schedule.

        Return None if the tables would be too large, or if nothing fits.
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
    """Return the largest number of micro-batches in flight on each stage of a schedule."""
    counts = [1] * schedule.num_stages
    for actions in schedule.rank_schedules:
        for action, now in in_flight(actions):
            counts[action.stage] = max(counts[action.stage], now[action.stage])
    return tuple(counts)


def _keeps_cap(draft: Draft) -> bool:
    """Return whether the schedule of a draft stays within its cap."""
    costs = draft.costs
    stages = costs.stages(draft.compute.placement)
    return costs.cap is None or max(peaks(draft.compute, stages)) <= costs.cap + TOLERANCE


@dataclass(frozen=True)
class Planner:
    """The judge of the candidates for a run.

    `spec` is the resolved run with everything that candidates do not choose. `epochs` gives the
    epochs to the target by global batch. If it is known, choices are ranked by the seconds to the
    target. `models` holds profiles and partitions by micro-batch size; they do not depend on the
    limit.
    """

    spec: RunSpec
    limit_bytes: int | None
    epochs: Epochs | None = None
    models: dict[int, ProfiledModel] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes to profile; with a given profile, only the size of that profile."""
        has_profile = self.spec.profile.path is not None
        return (self.spec.parallel.micro_batch_size,) if has_profile else PROFILED_SIZES

    def model(self, size: int) -> ProfiledModel:
        """Return the model at a micro-batch size.

        Profiles of sizes beyond two images are extrapolated from those of one and two. If the
        machine's rate depends on the size (machine.multiprocessors), they are extrapolated from the
        powers of two next to them.

        Raises:
            ConfigError: the profile cannot be taken or read.
        """
        if size not in self.models:
            is_given = self.spec.profile.path is not None
            has_curve = not is_given and self.spec.machine.multiprocessors is not None
            power = 1 << (size.bit_length() - 1)
            if size in self.sizes or (has_curve and size == power):
                profile = self._own_profile(size)
            else:
                sizes = (power, 2 * power) if has_curve else self.sizes
                points = [self.model(profiled_size).profile for profiled_size in sizes]
                profile = extrapolate(points, self.spec.data.sides, size)
            self.models[size] = ProfiledModel(profile, self._optimizer)
        return self.models[size]

    def _own_profile(self, size: int) -> ModelProfile:
        parallel = replace(self.spec.parallel, micro_batch_size=size, strips=1)
        return Draft(replace(self.spec, parallel=parallel)).profile

    def confirmed(self, best: Sequence[Choice]) -> tuple[Choice, ...]:
        """Return the choices judged again by the real profiles of their micro-batch sizes.

        A run uses these profiles. Choices that turn out too large are dropped. The choices are
        returned unchanged if none fits, or if a profile is not available.
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
            judge.evaluate(candidate)
            if candidate.strips == 1 and candidate.micro_batch_size in guessed
            else choice
            for choice in best
            for candidate in (choice.candidate,)
        ]
        fitting = [self.with_noise(choice) for choice in judged if isinstance(choice, Choice)]
        return tuple(sorted(fitting, key=attrgetter("score_s", "most_bytes"))) or tuple(best)

    def rules(self) -> Rules[Candidate, Choice]:
        """Return the rules of the search, which rank by the seconds of a step or to the target."""
        return Rules(
            lambda candidate: self.score(
                candidate,
                bounds.least_step_s(candidate, self.model(candidate.micro_batch_size).load),
            ),
            lambda candidate: self.score(candidate, self._refined_s(candidate)),
            lambda candidate: (
                self.limit_bytes is not None and self.least_bytes(candidate) > self.limit_bytes
            ),
            self.evaluate,
            self.priority,
        )

    def priority(self, candidate: Candidate) -> int:
        """Return the position of a candidate in the search; lower ones are tried first.

        The priority rises by one for each factor of four in effort. Candidates that are probably
        too large come last. Cheap candidates soon find times that spare the search most of the
        expensive ones.
        """
        effort = bounds.effort(candidate, self.model(candidate.micro_batch_size).load)
        return ceil(log(max(effort, EFFORT) / EFFORT, 4)) + 100 * self.is_unlikely(candidate)

    def least_bytes(self, candidate: Candidate, flight_counts: Sequence[float] = ()) -> int:
        """Return a lower bound on the bytes of a candidate's fullest rank.

        `held` is the number of micro-batches in flight on each rank.
        """
        return bounds.least_bytes(
            candidate, self.model(candidate.micro_batch_size).load, flight_counts
        )

    def estimated_bytes(self, candidate: Candidate) -> float:
        """Estimate the bytes of a candidate's fullest rank."""
        return bounds.estimated_bytes(candidate, self.model(candidate.micro_batch_size).load)

    @property
    def _optimizer(self) -> Optimizer:
        return OPTIMIZERS[optimizer_name(self.spec.train, self.spec.optimizer)]

    def is_unlikely(self, candidate: Candidate) -> bool:
        """Return whether a candidate probably exceeds its devices or the host memory of a node."""
        if (
            self.limit_bytes is not None
            and self.estimated_bytes(candidate) > ESTIMATE_ERROR * self.limit_bytes
        ):
            return True
        on_host = bounds.estimated_host_bytes(
            candidate, self.model(candidate.micro_batch_size).load
        )
        run = self.run_of(candidate)
        room = Room.of(run.machine, run.parallel, run.cluster.ranks_per_node)
        node_bytes = room.node_bytes([round(on_host / ESTIMATE_ERROR)])
        return room.host_bytes is not None and node_bytes > room.host_bytes

    def run_of(self, candidate: Candidate, boundaries: tuple[int, ...] = ()) -> RunSpec:
        """Return the resolved run of a candidate and partition, on devices of the limit."""
        spec = self.spec
        on_node = self.spec.cluster.gpus_per_node or self.spec.machine.ranks_per_node
        parallel = replace(
            spec.parallel,
            partitions=candidate.partitions,
            replicas=candidate.replicas,
            micro_batches=candidate.micro_batches,
            replications=candidate.micro_batches // candidate.parts,
            parts=candidate.parts,
            micro_batch_size=candidate.micro_batch_size,
            boundaries=None if candidate.family.is_searched else list(boundaries) or None,
            gpus=None,
            strips=list(candidate.strips)
            if isinstance(candidate.strips, tuple)
            else candidate.strips,
        )
        schedule = replace(
            spec.schedule,
            name=candidate.schedule,
            chunks=candidate.chunks if candidate.chunks > 1 else spec.schedule.chunks,
            activation_cap=candidate.cap,
            activation_cap_bytes=None,
            path=None,
            memory_actions=[],
        )
        if candidate.family.is_searched:
            schedule = replace(schedule, budget_s=min(schedule.budget_s, SEARCH_BUDGET_S))
        how = candidate.how or spec.memory.recompute
        memory = replace(
            spec.memory, name=candidate.memory, recompute=how, offload_inputs=False
        )  # offloaded inputs are not among the candidates
        if candidate.memory == "plan":
            memory = replace(memory, budget_s=min(memory.budget_s, PLAN_BUDGET_S))
        name = spec.cost.name if spec.cost.from_layers else PROFILE
        cost = replace(spec.cost, name=name, activation_bytes=0)
        machine = replace(spec.machine, device_bytes=self.limit_bytes)
        cluster = replace(spec.cluster, ranks_per_node=on_node or None)
        return replace(
            spec,
            parallel=parallel,
            schedule=schedule,
            memory=memory,
            cost=cost,
            machine=machine,
            cluster=cluster,
        )

    def changes(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the settings that a candidate's run changes besides its overrides."""
        run = self.run_of(candidate)
        own = {word.partition("=")[0] for word in candidate.overrides()}
        names = (*CHANGED, "parallel.boundaries") if candidate.family.is_searched else CHANGED
        values = ((name, attrgetter(name)(run)) for name in names if name not in own)
        words = ((name, value) for name, value in values if value != attrgetter(name)(self.spec))
        return tuple(f"{name}={json.dumps(value)}" for name, value in words)

    def evaluate(
        self, candidate: Candidate, worst_s: float = inf
    ) -> Choice | TooLarge | TooSlow | None:
        """Partition, schedule and simulate a candidate, unless its score must exceed `worst_s`.

        Return None for invalid counts, or for a memory policy if the candidate fits without one.
        """
        try:
            if candidate.memory != KEEP:
                if candidate.kept not in self._fits:
                    self.evaluate(candidate.kept, worst_s)
                if self._fits.get(candidate.kept):
                    return None
            else:
                self._fits[candidate] = False
                if self.limit_bytes is not None and self.least_bytes(candidate) > self.limit_bytes:
                    return TooLarge(self.least_bytes(candidate))
            drafts = self._not_slower(candidate, worst_s)
            if drafts is None:
                self._fits.pop(candidate, None)
                return TooSlow()
            choice = self._fitting(candidate, drafts)
            if candidate.memory == KEEP:
                self._fits[candidate] = isinstance(choice, Choice)
            return choice
        except ConfigError:
            return None

    @cached_property
    def _fits(self) -> dict[Candidate, bool]:
        """Whether each candidate that keeps its activations fits; no policy is faster."""
        return {}

    def _not_slower(self, candidate: Candidate, worst_s: float) -> Iterable[Draft] | None:
        """Return the drafts of a candidate, or None if all of them score above `worst_s`.

        The bound holds because a schedule is fastest on free links with all activations kept.
        """
        drafts = self._drafts(candidate)
        slower = []
        if worst_s == inf or candidate.family.is_searched:
            return drafts
        for draft in drafts:
            slower.append(draft)
            if self.score(candidate, self._compute_s(candidate, draft)) * (1 - ROUNDING) <= worst_s:
                return chain(slower, drafts)
        return None

    def _compute_s(self, candidate: Candidate, draft: Draft) -> float:
        """Return the seconds of a step without messages, which no memory policy changes."""
        key = candidate.kept, tuple(draft.spec.parallel.boundaries or ())
        if key not in self._computed_s:
            stages = draft.costs.stages(draft.compute.placement)
            self._computed_s[key] = simulate(draft.compute, stages).span
        return self._computed_s[key]

    @cached_property
    def _computed_s(self) -> dict[tuple[Candidate, tuple[int, ...]], float]:
        return {}

    def _fitting(self, candidate: Candidate, drafts: Iterable[Draft]) -> Choice | TooLarge:
        """Return the choice for the first draft that fits."""
        least = sys.maxsize
        for draft in drafts:
            try:
                if candidate.memory == KEEP and self.limit_bytes is not None:
                    self._check_peak(candidate, draft, self.limit_bytes)
                plan = finish(draft)
                is_cut = candidate.memory == KEEP and not candidate.family.is_searched
                if is_cut and plan.boundaries != self._by_time(candidate)[0]:
                    plan = self._faster(candidate, draft) or plan
                return self.choice(candidate, plan)
            except DoesNotFitError as error:
                if error.key != HOST:
                    least = min(least, error.needed_bytes)
        return TooLarge(least)

    def _check_peak(self, candidate: Candidate, draft: Draft, limit: int) -> None:
        """Check the bytes of a candidate that keeps its activations, before its step is simulated.

        Raises:
            DoesNotFitError: a rank would hold more than the limit.
        """
        peak = self.least_bytes(candidate, bounds.held_at_once(draft.compute))
        if peak <= limit:
            model = MemoryModel(self.model(candidate.micro_batch_size).spans, self._optimizer)
            boundaries = draft.spec.parallel.boundaries or draft.search_result["boundaries"]
            peak = max(model.peak_bytes(lower(draft.compute), boundaries))
        if peak > limit:
            raise DoesNotFitError(str(candidate), peak, limit, "")

    def _faster(self, candidate: Candidate, draft: Draft) -> Plan | None:
        """Return the plan with the exact partition within the bytes, if that fits."""
        boundaries = self.model(candidate.micro_batch_size).within(
            lower(draft.compute), draft.partitioner.optimizer, self.limit_bytes or sys.maxsize
        )
        if boundaries is None:
            return None
        other = self._draft(candidate, boundaries)
        with suppress(DoesNotFitError):
            self._check_peak(candidate, other, self.limit_bytes or sys.maxsize)
            return finish(other) if _keeps_cap(other) else None
        return None

    def _drafts(self, candidate: Candidate) -> Iterator[Draft]:
        """Yield the candidate with its fastest partition, then with its smallest one if needed."""
        if candidate.family.is_searched:
            yield self._draft(candidate)
            return
        fastest = self._by_time(candidate)[0]
        draft = self._draft(candidate, fastest)
        if _keeps_cap(draft):
            yield draft
        elif self.limit_bytes is None or candidate.num_stages == 1:
            raise ConfigError(
                "schedule.activation_cap", candidate.cap, f"is less than {candidate.schedule} holds"
            )
        if self.limit_bytes is None or candidate.num_stages == 1:
            return
        # recomputed activations exist for one micro-batch at a time
        counts = stashes(draft.compute) if candidate.memory == KEEP else (1,) * candidate.num_stages
        boundaries = self.model(candidate.micro_batch_size).by_bytes(counts)
        other = self._draft(candidate, boundaries)
        if boundaries != fastest and _keeps_cap(other):
            yield other

    def _draft(self, candidate: Candidate, boundaries: tuple[int, ...] = ()) -> Draft:
        profile = self.model(candidate.micro_batch_size).profile
        return Draft(self.run_of(candidate, boundaries), known=profile)

    def choice(self, candidate: Candidate, plan: Plan, step: Simulation | None = None) -> Choice:
        """Return the choice for a candidate and its plan; the default step has no noise."""
        outcome = plan.memory
        step = step or outcome.simulation
        return Choice(
            candidate,
            plan.boundaries,
            step.span,
            self.score(candidate, step.span),
            step.efficiency,
            outcome.peak_bytes,
            outcome.host_bytes,
            partial(parts_s, outcome, step),
            lambda: self.choice(
                candidate, plan, with_jitter(outcome, self.spec.machine.noise, self.spec.seed)[0]
            ),
            None if self.epochs is None else self.epochs(candidate.global_batch),
            self.changes(candidate),
        )

    def with_noise(self, choice: Choice) -> Choice:
        """Return a choice with the median of its steps under machine.noise.

        This would take too long for all candidates.
        """
        return (
            replace(choice.noisy(), noisy=None)
            if self.spec.machine.noise and choice.noisy
            else choice
        )

    def score(self, candidate: Candidate, step_s: float) -> float:
        """Return the seconds of a step, or of all steps to the target, which rank a candidate."""
        if self.epochs is None:
            return step_s
        return (
            step_s
            * self.epochs(candidate.global_batch)
            * self.spec.data.train_samples
            / candidate.global_batch
        )

    def _refined_s(self, candidate: Candidate) -> float:
        bottleneck_s = 0.0 if candidate.family.is_searched else self._by_time(candidate)[1]
        return bounds.least_step_s(
            candidate, self.model(candidate.micro_batch_size).load, bottleneck_s
        )

    def _by_time(self, candidate: Candidate) -> tuple[tuple[int, ...], float]:
        """Return the fastest partition at the smallest size, and its bottleneck in seconds.

        The times of layers grow nearly alike with the micro-batch size, so the partition serves all
        sizes. For other sizes, the layer that grows least bounds the seconds of the heaviest rank
        from below.
        """
        smallest = self.model(self.sizes[0])
        boundaries, bottleneck_s = smallest.by_time(
            candidate.family.place(candidate.partitions, candidate.chunks)
        )
        if candidate.micro_batch_size == self.sizes[0]:
            return boundaries, bottleneck_s
        pairs = zip(
            self.model(candidate.micro_batch_size).profile.layers,
            smallest.profile.layers,
            strict=True,
        )
        grows = min(
            (layer.time_s / base.time_s for layer, base in pairs if base.time_s), default=0.0
        )
        return boundaries, grows * bottleneck_s

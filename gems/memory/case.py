"""The case of a memory policy: a model, its partition and schedule, and the outcome of a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gems.memory.model import OPTIMIZERS, static_blocks
from gems.memory.plan import MemoryPlan, Place, add_memory, place_of
from gems.memory.timeline import RankTimeline, rank_timeline, segment_costs
from gems.profile import ModelProfile
from gems.profile.strip_profile import StripProfile
from gems.schedule.action import COMPUTE_KINDS, WAIT_KINDS, Action, Kind
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.dependencies import dependencies
from gems.schedule.ledger import TOLERANCE
from gems.schedule.lower import compute_only, lower
from gems.schedule.replicas import slowest_replica, with_all_reduce
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import EVEN, Pace, Simulation


@dataclass(frozen=True)
class MemoryCase:
    """The input of a memory policy; `schedule` is the compute-only one, in whole stages.

    Rates are in bytes per second. `limit_bytes` is the most that a rank may hold. `network` has
    times in seconds, and `paces` has one entry for each replica. In `strips`, each stage is a layer
    of the profile (`gems.memory.strips`).
    """

    profile: ModelProfile
    schedule: Schedule
    boundaries: tuple[int, ...]
    optimizer: str = "sgd"
    limit_bytes: int | None = None
    d2h_bytes_per_s: float = 5e9
    h2d_bytes_per_s: float = 5e9
    network: Network = FREE
    least_bytes: int = 0
    paces: tuple[Pace, ...] = (EVEN,)
    strips: StripProfile | None = None

    @cached_property
    def kept(self) -> PlanOutcome:
        """The step without any policy."""
        return self.outcome(MemoryPlan.keeping(self.boundaries))

    def lowered(self, plan: MemoryPlan) -> Schedule:
        """Return the schedule under a plan, each receive posted with the fewest buffers."""
        return lower(add_memory(self.schedule, plan))

    def peak_bytes(self, plan: MemoryPlan, ranks: Iterable[int] | None = None) -> Iterator[int]:
        """Yield the peak bytes on the device of each of the ranks (default: all) under a plan."""
        plan = replace(plan, least_bytes=self.least_bytes)
        for timeline in self.timelines(plan, self.lowered(plan), ranks):
            yield timeline.peak_bytes

    def static_blocks(self, rank: int) -> Iterator[int]:
        """Yield the sizes in bytes of the allocations that a rank holds throughout a step."""
        return static_blocks(
            self.profile, self.schedule, rank, self.boundaries, OPTIMIZERS[self.optimizer]
        )

    def outcome(self, plan: MemoryPlan, schedule: Schedule | None = None) -> PlanOutcome:
        """Simulate a plan: bytes by the order of the schedule, time by simulation.

        The schedule is `lowered` unless given.
        """
        plan = replace(plan, least_bytes=self.least_bytes)
        schedule = schedule or self.lowered(plan)
        costs = segment_costs(
            self.profile, plan, schedule, self.d2h_bytes_per_s, self.h2d_bytes_per_s
        )
        return PlanOutcome(plan, schedule, costs, self.network, self)

    def with_early_receives(self, outcome: PlanOutcome) -> PlanOutcome:
        """Return the outcome with receives in time for their links, if that is faster.

        Their buffers must fit.
        """
        schedule = lower(compute_only(outcome.schedule), outcome.costs, self.network)
        early = replace(outcome, schedule=schedule)
        if (
            schedule.rank_schedules == outcome.schedule.rank_schedules
            or early.step_s >= outcome.step_s * (1 - TOLERANCE)
        ):
            return outcome
        limit = (
            sys.maxsize if self.limit_bytes is None else max(self.limit_bytes, *outcome.peak_bytes)
        )
        return early if max(early.peak_bytes) <= limit else outcome

    def as_run(self, outcome: PlanOutcome) -> PlanOutcome:
        """Return the outcome as it runs.

        Its receives are in time for the links, and it has the slowest of all replicas. Policies
        plan for one replica, without reductions, and with as few posted buffers as possible.
        """
        outcome = self.with_early_receives(outcome)
        costs = with_all_reduce(
            outcome.costs, outcome.schedule.placement, self.network, len(self.paces)
        )
        as_run = replace(outcome, costs=costs, paces=self.paces)
        # the ranks have already been walked
        as_run.__dict__.update(
            (name, value) for name, value in outcome.__dict__.items() if name == "ranks"
        )
        return as_run

    def timelines(
        self, plan: MemoryPlan, schedule: Schedule, ranks: Iterable[int] | None = None
    ) -> Iterator[RankTimeline]:
        """Yield the bytes along a lowered schedule under a plan, for each rank (default: all)."""
        for rank in range(schedule.num_ranks) if ranks is None else ranks:
            yield rank_timeline(
                self.profile, plan, schedule, rank, OPTIMIZERS[self.optimizer], self.strips
            )


@dataclass(frozen=True)
class PlanOutcome:
    """A plan with its lowered schedule and costs.

    The bytes of ranks and the step are computed on first access. Without a `case`, the layers and
    so the bytes of ranks are unknown. `cap` is the most that a rank may hold, in the costs' unit of
    size; the step waits for copies to the host that keep it. `paces` has the disturbances of each
    replica.
    """

    plan: MemoryPlan
    schedule: Schedule
    costs: StageCosts
    links: Network
    case: MemoryCase | None = None
    cap: float | None = None
    paces: tuple[Pace, ...] = (EVEN,)

    @property
    def is_segmented(self) -> bool:
        """Whether stages run in segments; only memory=keep has whole stages."""
        return any(self.schedule.num_segments)

    @cached_property
    def ranks(self) -> tuple[RankTimeline, ...]:
        """The bytes along the schedule, by rank."""
        return () if self.case is None else tuple(self.case.timelines(self.plan, self.schedule))

    @cached_property
    def _slowest(self) -> tuple[Network, Simulation]:
        return slowest_replica(self.schedule, self.costs, self.links, self.paces, self.cap)

    @property
    def network(self) -> Network:
        """The links of the slowest replica."""
        return self._slowest[0]

    @property
    def simulation(self) -> Simulation:
        """One step of the slowest replica, for which the others wait."""
        return self._slowest[1]

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes on the device, by rank."""
        return tuple(rank.peak_bytes for rank in self.ranks)

    @property
    def fullest_rank(self) -> int:
        """The rank with the highest peak, the first of several."""
        return self.peak_bytes.index(max(self.peak_bytes)) if self.peak_bytes else 0

    @cached_property
    def host_bytes(self) -> tuple[int, ...]:
        """Peak bytes in host memory, by rank."""
        return tuple(rank.peak_host_bytes for rank in self.ranks)

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.simulation.span

    def to_json(self) -> dict[str, Any]:
        """Return the predictions, with an entry per rank, for comparison with a run."""
        return {
            "step_s": self.step_s,
            "peak_bytes": list(self.peak_bytes),
            "peak_activation_bytes": [rank.peak_activation_bytes for rank in self.ranks],
            "host_bytes": list(self.host_bytes),
        }


@dataclass(slots=True)
class Exposure:
    """The cost of a segment in a step, over all its micro-batches and directions, in seconds."""

    copy_s: float = 0.0  # both ways
    exposed_s: float = 0.0  # time for which ranks wait for copies
    again_s: float = 0.0  # recomputation
    moved_bytes: int = 0  # by copies out
    out_s: float | None = None  # start of the first micro-batch's copy out
    back_s: float | None = None  # end of its copy back


def exposures(outcome: PlanOutcome) -> dict[Place, Exposure]:
    """Return the cost of each segment of a plan in the simulated step."""
    costs: dict[Place, Exposure] = {}
    for rank, timeline in enumerate(outcome.ranks):
        starts = outcome.simulation.start[rank]
        ends = outcome.simulation.end[rank]
        arrival: dict[Action, float] = {}
        free = 0.0
        for point, start, end in zip(timeline.points, starts, ends, strict=True):
            action = point.action
            kind = point.action.kind
            if action.segment is None:
                free = max(free, end) if kind in COMPUTE_KINDS else free
                continue
            exposure = costs.setdefault(place_of(action), Exposure())
            if kind is Kind.OFFLOAD:
                exposure.copy_s = exposure.copy_s + end - start
                exposure.moved_bytes += point.moved_bytes
                exposure.out_s = start if exposure.out_s is None else exposure.out_s
            elif kind is Kind.PREFETCH:
                arrival[action] = end
                exposure.copy_s = exposure.copy_s + end - start
                exposure.back_s = end if exposure.back_s is None else exposure.back_s
            elif kind in COMPUTE_KINDS or kind in WAIT_KINDS:
                ready = start
                if kind is not Kind.FREE:
                    copies = [
                        arrival[need]
                        for need in dependencies(action, outcome.schedule)
                        if need in arrival
                    ]
                    ready = min(start, max(copies, default=free))
                exposure.exposed_s += max(0.0, ready - free)
                exposure.again_s += end - start if kind is Kind.R else 0.0
                free = end
    return costs

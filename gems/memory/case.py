"""The case of a memory policy: a model, its partition and schedule, and what a plan makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gems.memory.memory_actions import add_memory
from gems.memory.model import OPTIMIZERS, static_blocks
from gems.memory.plan import MemoryPlan
from gems.memory.segment_costs import segment_costs
from gems.memory.timeline import RankTimeline, rank_timeline
from gems.profile import ModelProfile
from gems.schedule.action import COMPUTE_KINDS, WAIT_KINDS, Action, Kind
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.dependencies import dependencies
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate


@dataclass(frozen=True)
class MemoryCase:
    """What a policy plans for: `schedule` is the compute-only one, in whole stages. Rates are bytes per second.

    `limit_bytes` is what a rank may hold; `network` has times in seconds.
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
    num_replicas: int = 1

    @cached_property
    def kept(self) -> PlanOutcome:
        """The step without any policy."""
        return self.outcome(MemoryPlan.keeping(self.boundaries))

    def lowered(self, plan: MemoryPlan) -> Schedule:
        """Return the schedule that ranks run under a plan."""
        return lower(add_memory(self.schedule, plan))

    def peak_bytes(self, plan: MemoryPlan, ranks: Sequence[int] | None = None) -> Iterator[int]:
        """Yield the peak bytes on the device of each of the ranks (default: all) under a plan."""
        plan = replace(plan, least_bytes=self.least_bytes)
        schedule, optimizer = self.lowered(plan), OPTIMIZERS[self.optimizer]
        for rank in range(schedule.num_ranks) if ranks is None else ranks:
            yield rank_timeline(self.profile, plan, schedule, rank, optimizer).peak_bytes

    def static_blocks(self, rank: int) -> Iterator[int]:
        """Yield the sizes in bytes of what a rank holds throughout a step."""
        return static_blocks(self.profile, self.schedule, rank, self.boundaries, OPTIMIZERS[self.optimizer])

    def outcome(self, plan: MemoryPlan) -> PlanOutcome:
        """Simulate a plan: bytes by the order of the schedule, time by simulation."""
        plan = replace(plan, least_bytes=self.least_bytes)
        schedule = self.lowered(plan)
        costs = segment_costs(self.profile, plan, schedule, self.d2h_bytes_per_s, self.h2d_bytes_per_s)
        ranks = tuple(
            rank_timeline(self.profile, plan, schedule, rank, OPTIMIZERS[self.optimizer])
            for rank in range(schedule.num_ranks)
        )
        return PlanOutcome(plan, schedule, costs, ranks, simulate(schedule, costs, self.network))


@dataclass(frozen=True)
class PlanOutcome:
    """A plan with the lowered schedule, its costs in seconds and bytes, each rank's bytes, and the simulated step."""

    plan: MemoryPlan
    schedule: Schedule
    costs: StageCosts
    ranks: tuple[RankTimeline, ...]
    simulation: Simulation

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes on the device, by rank."""
        return tuple(rank.peak_bytes for rank in self.ranks)

    @property
    def fullest_rank(self) -> int:
        """The rank with the highest peak, the first of several."""
        return self.peak_bytes.index(max(self.peak_bytes))

    @cached_property
    def host_bytes(self) -> tuple[int, ...]:
        """Peak bytes in host memory, by rank."""
        return tuple(rank.peak_host_bytes for rank in self.ranks)

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.simulation.span

    def to_json(self) -> dict[str, Any]:
        """Return the predictions, an entry per rank, for comparison with what a run measures."""
        return {
            "step_s": self.step_s,
            "peak_bytes": list(self.peak_bytes),
            "peak_activation_bytes": [rank.peak_activation_bytes for rank in self.ranks],
            "host_bytes": list(self.host_bytes),
        }


Place = tuple[int, int]  # (stage, segment)


@dataclass(frozen=True, slots=True)
class Exposure:
    """The cost of a segment in a step, over all its micro-batches and directions, in seconds.

    `copy_s` is the time of its copies both ways, `exposed_s` what ranks wait for them, `again_s` that of its
    recomputes. `out_s` and `back_s` are when the copy out of its first micro-batch begins and its copy back ends,
    `moved_bytes` what its copies out carry; None if nothing is copied.
    """

    copy_s: float = 0.0
    exposed_s: float = 0.0
    again_s: float = 0.0
    moved_bytes: int = 0
    out_s: float | None = None
    back_s: float | None = None


def exposures(outcome: PlanOutcome) -> dict[Place, Exposure]:
    """Return the cost of each segment of a plan in the simulated step."""
    found: dict[Place, Exposure] = {}
    for rank, row in enumerate(outcome.schedule.rows):
        starts, ends = outcome.simulation.start[rank], outcome.simulation.end[rank]
        moved = {point.action: point.moved_bytes for point in outcome.ranks[rank].points}
        arrival: dict[Action, float] = {}
        free = 0.0
        for action, start, end in zip(row, starts, ends, strict=True):
            kind, place = action.kind, (action.stage, action.segment)
            if action.segment is None:
                free = max(free, end) if kind in COMPUTE_KINDS else free
                continue
            one = found.get(place, Exposure())  # type: ignore[arg-type]
            if kind is Kind.OFFLOAD:
                out_s = start if one.out_s is None else one.out_s
                one = replace(
                    one, copy_s=one.copy_s + end - start, out_s=out_s, moved_bytes=one.moved_bytes + moved[action]
                )
            elif kind is Kind.PREFETCH:
                arrival[action] = end
                one = replace(one, copy_s=one.copy_s + end - start, back_s=end if one.back_s is None else one.back_s)
            elif kind in COMPUTE_KINDS or kind in WAIT_KINDS:
                waited = _waited(action, free, start, outcome, arrival)
                again = end - start if kind is Kind.R else 0.0
                one = replace(one, exposed_s=one.exposed_s + waited, again_s=one.again_s + again)
                free = end
            found[place] = one  # type: ignore[index]
    return found


def _waited(action: Action, free: float, start: float, outcome: PlanOutcome, arrival: dict[Action, float]) -> float:
    """Return how long a rank waited for a copy before an action, from `free` on."""
    if action.kind is Kind.FREE:
        return max(0.0, start - free)
    copies = [arrival[need] for need in dependencies(action, outcome.schedule) if need in arrival]
    return max(0.0, min(start, max(copies)) - free) if copies else 0.0

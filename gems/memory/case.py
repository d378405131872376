"""A case for a memory policy: a model, its cut and its schedule, and what a plan makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gems.memory.memory_actions import add_memory
from gems.memory.model import OPTIMIZERS
from gems.memory.plan import MemoryPlan
from gems.memory.segment_costs import segment_costs
from gems.memory.walk import Walked, walk
from gems.profile import ModelProfile
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate


@dataclass(frozen=True)
class MemoryCase:
    """What a policy plans for: `schedule` is the compute-only one, in whole stages; rates are bytes per second.

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
    def kept(self) -> Outcome:
        """What the step is without any policy."""
        return self.outcome(MemoryPlan.keeping(self.boundaries))

    def lowered(self, plan: MemoryPlan) -> Schedule:
        """Return the list that ranks run under a plan."""
        return lower(add_memory(self.schedule, plan))

    def peak_bytes(self, plan: MemoryPlan, ranks: Sequence[int] | None = None) -> Iterator[int]:
        """Yield the most that each of the ranks, by default of all, holds on its device under a plan."""
        plan = replace(plan, least_bytes=self.least_bytes)
        schedule, optimizer = self.lowered(plan), OPTIMIZERS[self.optimizer]
        for rank in range(schedule.num_ranks) if ranks is None else ranks:
            yield walk(self.profile, plan, schedule, rank, optimizer).peak_bytes

    def outcome(self, plan: MemoryPlan) -> Outcome:
        """Simulate a plan: bytes by the order of the list, time by simulation."""
        plan = replace(plan, least_bytes=self.least_bytes)
        schedule = self.lowered(plan)
        costs = segment_costs(self.profile, plan, schedule, self.d2h_bytes_per_s, self.h2d_bytes_per_s)
        ranks = tuple(
            walk(self.profile, plan, schedule, rank, OPTIMIZERS[self.optimizer]) for rank in range(schedule.num_ranks)
        )
        return Outcome(plan, schedule, costs, ranks, simulate(schedule, costs, self.network))


@dataclass(frozen=True)
class Outcome:
    """A plan with what it does: the lowered list and its costs in seconds and bytes, each rank's bytes along it, and the simulated step in seconds."""

    plan: MemoryPlan
    schedule: Schedule
    costs: StageCosts
    ranks: tuple[Walked, ...]
    played: Simulation

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds on its device."""
        return tuple(rank.peak_bytes for rank in self.ranks)

    @property
    def fullest_rank(self) -> int:
        """The rank that holds most on its device, the first of several."""
        return self.peak_bytes.index(max(self.peak_bytes))

    @cached_property
    def host_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds in host memory."""
        return tuple(rank.peak_host_bytes for rank in self.ranks)

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.played.span

    def to_json(self) -> dict[str, Any]:
        """Return what is predicted, an entry a rank, to be set beside what a run measures."""
        return {
            "step_s": self.step_s,
            "peak_bytes": list(self.peak_bytes),
            "peak_activation_bytes": [rank.peak_activation_bytes for rank in self.ranks],
            "host_bytes": list(self.host_bytes),
        }

"""The part of a run's plan that its ranks read."""

from __future__ import annotations

from dataclasses import dataclass

from gems.config.schema import RunSpec
from gems.memory.plan import MemoryPlan
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The part of a run's plan that its ranks read; the same on all ranks."""

    spec: RunSpec
    schedule: Schedule  # lowered and validated
    boundaries: tuple[int, ...] = ()  # the cuts between layers; none if operators are placed
    memory_plan: MemoryPlan | None = None  # None if stages run whole

    def position(self, rank: int) -> tuple[int, int]:
        """Return the replica of a rank of the run, and its index in that pipeline."""
        return divmod(rank, self.spec.parallel.partitions)

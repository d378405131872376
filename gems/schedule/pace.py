"""The pace: ranks that compute slower than the costs say, and inputs or other replicas that come late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Pace:
    """What disturbs one pipeline beside the costs of its stages.

    Compute on `slow_rank`, a rank of the pipeline, takes `slowdown` times as long. A rank where a direction begins
    reads one input after the other from the beginning of the step on, each in `input` units of time. `slowdowns` says
    how many times as long everything takes that each rank does, 1 for all of them where none are given; `late`, by the
    stage that names a reduction, when peers in other replicas join it at the earliest.
    """

    slow_rank: int | None = None
    slowdown: float = 1.0
    input: float = 0.0
    slowdowns: tuple[float, ...] = ()
    late: Mapping[int, float] = field(default_factory=dict, hash=False)

    def factor(self, rank: int, action: Action) -> float:
        """Return how many times longer than its cost an action takes on `rank`."""
        usual = self.slowdowns[rank] if self.slowdowns else 1.0
        return usual * self.slowdown if rank == self.slow_rank and action.kind in COMPUTE_KINDS else usual

    def inputs_ready(self, schedule: Schedule, rank: int) -> dict[Action, float]:
        """Return when the input of each forward that reads one is ready, in units from the beginning of the step."""
        if not self.input:
            return {}
        first = schedule.first_segment(0)
        readers = (a for a in schedule.rows[rank] if a.kind is Kind.F and a.stage == 0 and a.segment == first)
        return {action: (number + 1) * self.input for number, action in enumerate(readers)}


EVEN = Pace()

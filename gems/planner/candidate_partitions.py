"""Cut the models of many candidates into stages.

Each placement is cut by time, and the cut kept for all candidates that share it; where that is too large, the cut is
within bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gems.partition.exact import solve
from gems.partition.methods import PartitionCase
from gems.partition.problem import InfeasibleError, Problem
from gems.planner.search.candidate import Candidate
from gems.profile import ModelProfile
from gems.profile.spans import RankCosts, Spans
from gems.schedule.ledger import in_flight
from gems.schedule.placement import Placement, looped
from gems.schedule.schedule import Schedule

CUT_BUDGET_S = 1.0
MAX_TABLE_BYTES = 2**29  # of the tables in which a cut within bytes is sought


@dataclass(frozen=True, slots=True)
class TimeCut:
    """The cut of least time of a placement.

    `bottleneck_s` is what its heaviest rank computes for one micro-batch at least, in seconds.
    """

    boundaries: tuple[int, ...]
    bottleneck_s: float


class Cuts:
    """The cuts of a profile, each made once."""

    def __init__(self, profile: ModelProfile) -> None:
        self.spans = Spans(profile)
        self._by_time: dict[object, TimeCut] = {}
        self._by_bytes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def by_time(self, one: Candidate) -> TimeCut:
        """Return the cut whose heaviest rank computes least: exact where ranks hold one stage or a pair of them.

        Where they hold several in a row of chunks, each stage is weighed by itself.
        """
        placement = placement_of(one)
        found = self._by_time.get(placement)
        if found is None:
            found = self._by_time[placement] = self._cut_by_time(placement)
        return found

    def by_bytes(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cut whose stages hold alike: of each what one micro-batch keeps, as often as `counts` says."""
        if counts not in self._by_bytes:
            ranks = tuple(
                RankCosts((stage,), ((partial(np.multiply, float(count), self.spans.stash),),))
                for stage, count in enumerate(counts)
            )
            self._by_bytes[counts] = solve(self._problem(len(counts), ranks)).boundaries
        return self._by_bytes[counts]

    def within(self, schedule: Schedule, optimizer: str, limit_bytes: int) -> tuple[int, ...] | None:
        """Return the exact cut of a lowered schedule, of the least time within the bytes.

        None where its tables are too large.
        """
        case = PartitionCase(self.spans.profile, schedule, optimizer, limit_bytes)
        case.__dict__["spans"] = self.spans
        num_tables = sum(len(rank.moments) * len(rank.stages) for rank in dict.fromkeys(case.memory))
        if num_tables * 8 * self.spans.num_layers**2 > MAX_TABLE_BYTES:
            return None
        try:
            return solve(case.problem("time"), CUT_BUDGET_S).boundaries
        except InfeasibleError:
            return None

    def _cut_by_time(self, placement: Placement) -> TimeCut:
        num_stages, num_ranks = placement.num_stages, placement.num_ranks
        is_alone = num_stages > 2 * num_ranks or (num_stages > num_ranks and placement == looped(num_ranks, 2))
        ranks = []
        for rank in range(num_stages if is_alone else num_ranks):
            held = ((0, rank),) if is_alone else placement.stages_on(rank)
            stages = tuple(sorted({stage for _, stage in held}))
            share = [sum(stage == each for _, each in held) / placement.num_directions for stage in stages]
            tables = tuple(partial(np.multiply, weight, self.spans.time_s) for weight in share)
            ranks.append(RankCosts(stages, (tables,)))
        found = solve(self._problem(num_stages, tuple(dict.fromkeys(ranks))), CUT_BUDGET_S)
        bottleneck_s = 0.0 if is_alone else found.cost if found.is_optimal else found.bound
        return TimeCut(found.boundaries, bottleneck_s)

    def _problem(self, num_stages: int, ranks: tuple[RankCosts, ...]) -> Problem:
        return Problem(self.spans.num_layers, num_stages, ranks, self.spans.boundary_bytes())


def stashes(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage of a schedule the most micro-batches in flight on it."""
    counts = [1] * schedule.num_stages
    for row in schedule.rows:
        for action, now in in_flight(row):
            counts[action.stage] = max(counts[action.stage], now[action.stage])
    return tuple(counts)


def placement_of(one: Candidate) -> Placement:
    """Return where a candidate's stages are; for a searched schedule, which chooses that itself, a chain."""
    return one.family.place(one.partitions, one.chunks)


def with_stages(one: Candidate, num_stages: int) -> Candidate:
    """Return a searched schedule's candidate as a chain of the stages that were found."""
    return replace(one, schedule="1f1b", partitions=num_stages)

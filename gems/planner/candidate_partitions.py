"""Partitions of the models of many candidates, each made once for all candidates that share it."""

from __future__ import annotations

from collections import Counter
from functools import cache, cached_property, partial

import numpy as np

from gems.memory.model import Optimizer
from gems.partition.exact import solve
from gems.partition.methods import PartitionCase
from gems.partition.problem import InfeasibleError, Problem
from gems.planner.search.bounds import Load, load_of
from gems.profile import ModelProfile
from gems.profile.spans import RankCosts, Spans
from gems.schedule.ledger import in_flight
from gems.schedule.placement import Placement, looped
from gems.schedule.schedule import Schedule

BUDGET_S = 1.0
MAX_TABLE_BYTES = 2**29  # of the tables in which a partition within bytes is sought


class ProfiledModel:
    """A model at one micro-batch size: its profile, what the bounds need of it, and its partitions."""

    def __init__(self, profile: ModelProfile, optimizer: Optimizer) -> None:
        self.profile = profile
        self._optimizer = optimizer
        self.spans = Spans(profile)
        self.by_time = cache(self._by_time)
        self.by_bytes = cache(self._by_bytes)

    @cached_property
    def load(self) -> Load:
        """What one micro-batch is."""
        return load_of(self.profile, self._optimizer)

    def _by_time(self, placement: Placement) -> tuple[tuple[int, ...], float]:
        """Return the partition whose heaviest rank computes least, and the seconds that this takes it at least.

        It is exact where ranks hold one stage or a pair of them; where they hold several in a row of chunks, each stage
        is weighed by itself.
        """
        num_stages, num_ranks = placement.num_stages, placement.num_ranks
        is_alone = num_stages > 2 * num_ranks or (num_stages > num_ranks and placement == looped(num_ranks, 2))
        ranks = []
        for rank in range(num_stages if is_alone else num_ranks):
            held = ((0, rank),) if is_alone else placement.stages_on(rank)
            counts = sorted(Counter(stage for _, stage in held).items())
            shares = (count / placement.num_directions for _, count in counts)
            tables = tuple(partial(np.multiply, share, self.spans.time_s) for share in shares)
            ranks.append(RankCosts(tuple(stage for stage, _ in counts), (tables,)))
        best = solve(self._problem(num_stages, tuple(dict.fromkeys(ranks))), BUDGET_S)
        return best.boundaries, 0.0 if is_alone else best.cost if best.is_optimal else best.bound

    def _by_bytes(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the partition whose stages hold alike: what one micro-batch keeps, as often as `counts` has it."""
        ranks = tuple(
            RankCosts((stage,), ((partial(np.multiply, float(count), self.spans.stash),),))
            for stage, count in enumerate(counts)
        )
        return solve(self._problem(len(counts), ranks)).boundaries

    def within(self, schedule: Schedule, optimizer: str, limit_bytes: int) -> tuple[int, ...] | None:
        """Return the exact partition for a lowered schedule, of the least time within the bytes.

        None where its tables are too large, or nothing fits.
        """
        case = PartitionCase(self.profile, schedule, optimizer, limit_bytes)
        case.__dict__["spans"] = self.spans
        num_tables = sum(len(rank.moments) * len(rank.stages) for rank in dict.fromkeys(case.memory))
        if num_tables * 8 * self.spans.num_layers**2 > MAX_TABLE_BYTES:
            return None
        try:
            return solve(case.problem("time"), BUDGET_S).boundaries
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

"""Define your own schedule.

Use it with `plugins=[examples.own_schedule] schedule=waves parallel.partitions=4
parallel.micro_batches=8`.

GPipe in waves of P micro-batches: it holds P of them in place of N, and pays for the idle time of
each wave.
"""

from __future__ import annotations

from gems.errors import ConfigError
from gems.schedule.action import Action, backward, forward
from gems.schedule.placement import linear
from gems.schedule.registry import Request, schedule_family
from gems.schedule.schedule import Schedule


@schedule_family(
    "waves",
    step_units=lambda s: (
        s.n // s.p * (2 * s.p - 1) * (s.f + s.b)
    ),  # gems simulate and the tests compare with it
    peak_units=lambda s: s.p,
)
def waves(request: Request) -> Schedule:
    """Build the compute actions of each rank, in order; sends, sums and the step are added to them."""
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    if num_micro_batches % num_ranks:
        raise ConfigError(
            "parallel.micro_batches", num_micro_batches, f"must be a multiple of {num_ranks} ranks"
        )
    rank_schedules: list[tuple[Action, ...]] = []
    for stage in range(num_ranks):
        actions: list[Action] = []
        for first in range(0, num_micro_batches, num_ranks):
            wave = range(first, first + num_ranks)
            actions += [forward(stage, m) for m in wave]
            actions += [backward(stage, m) for m in wave]
        rank_schedules.append(tuple(actions))
    return Schedule("waves", num_micro_batches, linear(num_ranks), tuple(rank_schedules))

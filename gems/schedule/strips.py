"""Strips: the rows of a micro-batch's images, processed as a sequence of smaller micro-batches.

Layers keep the rows that one strip has not used up for the next strip (the carry). On each stage,
forward therefore runs from the first strip to the last, and backward from the last to the first. In
a list with `num_strips` k, the strips of micro-batch m are numbered m k to m k + k - 1, in place of
micro-batches (`gems.schedule.dependencies` knows their order).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gems.errors import ConfigError
from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.costs import STAGE_SIZES, STAGE_TIMES, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.registry import Costs
from gems.schedule.schedule import Schedule


def with_strips(schedule: Schedule, num_strips: int) -> Schedule:
    """Return a compute-only schedule with each whole micro-batch replaced by its strips.

    Any order of whole micro-batches that runs also runs in strips: the memory of a rank is
    unchanged, and each stage on the way takes the time of a strip instead of that of a micro-batch.
    With whole backwards and a cap of one micro-batch, the efficiency is k / (k + P - 1).

    Raises:
        ConfigError: the stages form a graph.
    """
    if num_strips == 1:
        return schedule
    if not schedule.placement.is_chain:
        raise ConfigError(
            "parallel.strips",
            num_strips,
            f"must be 1 for schedule={schedule.name}, a graph of stages",
        )
    rank_schedules = tuple(
        tuple(_in_strips(actions, num_strips)) for actions in schedule.rank_schedules
    )
    num = schedule.num_micro_batches * num_strips
    return replace(
        schedule, num_micro_batches=num, num_strips=num_strips, rank_schedules=rank_schedules
    )


def without_strips(schedule: Schedule) -> Schedule:
    """Return the compute-only list of whole micro-batches.

    Each forward is placed where its last strip was, and each backward likewise.
    """
    num = schedule.num_strips
    rank_schedules = []
    for actions in schedule.rank_schedules:
        ends = (num - 1 if action.kind is Kind.F else 0 for action in actions)
        rank_schedules.append(
            tuple(
                action._replace(micro_batch=action.micro_batch // num)
                for action, end in zip(actions, ends, strict=True)
                if action.kind in COMPUTE_KINDS
                and action.micro_batch is not None
                and action.micro_batch % num == end
            )
        )
    return replace(
        schedule,
        num_micro_batches=schedule.num_whole,
        num_strips=1,
        rank_schedules=tuple(rank_schedules),
        passes=(),
    )


def _in_strips(actions: tuple[Action, ...], num_strips: int) -> Iterator[Action]:
    for action in actions:
        first = (action.micro_batch or 0) * num_strips
        strips = range(first, first + num_strips)
        for strip in strips if action.kind is Kind.F else reversed(strips):
            yield action._replace(micro_batch=strip)


def strip_costs(costs: StageCosts, num_strips: int) -> StageCosts:
    """Return the costs of a mean strip, from the costs of a whole micro-batch."""
    if costs.strip_loads and len(costs.strip_loads[0]) != num_strips:
        costs = replace(costs, strip_loads=())
    if num_strips == 1:
        return costs
    shares = {
        name: tuple(value / num_strips for value in getattr(costs, name))
        for name in (*STAGE_TIMES, *STAGE_SIZES, "boundary_bytes")
    }
    return replace(costs, **shares)


@dataclass(frozen=True, slots=True)
class StripCosts:
    """The costs of strips, from the costs of whole micro-batches, on any placement."""

    whole: Costs
    num_strips: int

    def of(self, placement: Placement) -> StageCosts:
        """Return the costs of the stages of a placement."""
        return strip_costs(self.whole.of(placement), self.num_strips)

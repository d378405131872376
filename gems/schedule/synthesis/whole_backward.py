"""Use whole backwards if they are faster.

An input gradient that is computed separately from the weight gradients takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from math import inf

from gems.errors import ScheduleError
from gems.schedule.action import Action, Kind
from gems.schedule.costs import Network, StageCosts
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate

MAX_SIMULATED = 300_000  # actions that are simulated to choose


class Joining(IntEnum):
    """The pairs of I and W of a stage that become one B, in the place of I."""

    NONE = 0
    NEIGHBOURS = 1
    ALL = 2


def with_whole_backwards(
    schedule: Schedule, costs: StageCosts, network: Network, cap: float | None
) -> Schedule:
    """Return the schedule with I and W joined to B on the stages where this shortens the step.

    First all stages are joined in the same way, then they are changed one after the other. Never
    more is held, because a weight gradient only moves to an earlier place.
    """
    if not any(costs.split) or not schedule.has_split_backward:
        return schedule
    stages = range(schedule.num_stages)
    actions_left = MAX_SIMULATED

    def joined_span(joinings: Sequence[Joining]) -> float:
        nonlocal actions_left
        actions_left -= sum(map(len, schedule.rank_schedules))
        try:
            return simulate(_joined(schedule, joinings), costs, network, cap).span
        except ScheduleError:  # this order has no room under the cap
            return inf

    spans = {(joining,) * len(stages): joined_span((joining,) * len(stages)) for joining in Joining}
    best = min(spans, key=spans.__getitem__)
    for stage in stages:
        for joining in Joining:
            tried = (*best[:stage], joining, *best[stage + 1 :])
            if tried not in spans and actions_left > 0:
                spans[tried] = joined_span(tried)
        best = min(spans, key=spans.__getitem__)
    return _joined(schedule, best)


def with_whole_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with every I and W joined to B."""
    return _joined(schedule, (Joining.ALL,) * schedule.num_stages)


def _joined(schedule: Schedule, joinings: Sequence[Joining]) -> Schedule:
    return replace(
        schedule,
        rank_schedules=tuple(
            tuple(_join_backwards(actions, joinings)) for actions in schedule.rank_schedules
        ),
    )


def _join_backwards(actions: Sequence[Action], joinings: Sequence[Joining]) -> Iterator[Action]:
    joined: set[Action] = set()
    for action, following in zip(actions, (*actions[1:], None), strict=True):
        how = joinings[action.stage]
        weight_gradient = action._replace(kind=Kind.W)
        is_joined = how is Joining.ALL or (
            how is Joining.NEIGHBOURS and following == weight_gradient
        )
        if action.kind is Kind.I and is_joined:
            joined.add(weight_gradient)
            yield action._replace(kind=Kind.B)
        elif action not in joined:
            yield action

"""Validation: reject a schedule that would not run, and name the rank and the action at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gems.errors import ScheduleError
from gems.schedule.action import (
    COMPUTE_KINDS,
    COPY_KINDS,
    RANK_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    WAIT_KINDS,
    Action,
    Kind,
)
from gems.schedule.costs import StageCosts, uniform
from gems.schedule.dependencies import dependencies, transfers_after
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate

_MADE_KINDS = COMPUTE_KINDS | COPY_KINDS | WAIT_KINDS
_F = Kind.F
_I = Kind.I
_WHOLE = (_F, Kind.B)
_SPLIT = (_F, _I, Kind.W)
_MEMORY_KINDS = (Kind.R, *COPY_KINDS, *WAIT_KINDS)
_TRANSFER_KINDS = SEND_KINDS | RECV_KINDS
_STAGE_KINDS = RANK_KINDS | {Kind.START_REDUCE}


def validate(
    schedule: Schedule, costs: StageCosts | None = None, cap: float | None = None
) -> Schedule:
    """Check a compute-only or lowered schedule and return it.

    - Every stage of every micro-batch runs forward and backward once (whole, or its two halves), on
      its rank and in one direction, together with all strips of its micro-batch.
    - Recomputation and copies back precede the backward; a segment with both is copied back first.
    - The forwards of a stage keep the order of the micro-batches, as statistics and random numbers
      do in one process; its backwards take strips from the last to the first.
    - Nothing runs before its data. Each transfer has a partner, and each need a transfer.
    - Gradients are reduced after the last backward, followed by the step. Peers reduce the same
      stages, once and at the same place; a sum starts early only for a stage that is done.
    - No rank waits forever, even if sends complete only after the receive is posted.
    - No rank holds more activations than the cap, if any, in the unit of `costs` (by default, one
      micro-batch on one of P equal parts).

    Raises:
        ScheduleError: names the first fault, and carries the schedule.
    """
    try:
        if len(schedule.rank_schedules) != schedule.num_ranks:
            raise ScheduleError(
                len(schedule.rank_schedules),
                "none",
                f"{len(schedule.rank_schedules)} rank schedules for {schedule.num_ranks} ranks",
            )
        _check_peers(schedule)
        if not schedule.placement.is_chain:
            _check_whole(schedule)
        _check_places(schedule)
        _check_compute_is_whole(schedule)
        _check_transfers(schedule)
        for rank, actions in enumerate(schedule.rank_schedules):
            _check_order(schedule, rank, actions)
            _check_forwards(rank, actions)
            _check_tail(schedule, rank, actions)
            _check_starts(schedule, rank, actions)
        equal = uniform(schedule.num_ranks, schedule.num_stages)
        simulate(
            schedule, costs or equal.in_segments([n or 1 for n in schedule.num_segments]), cap=cap
        )
    except ScheduleError as error:
        error.schedule = schedule
        raise
    return schedule


def _check_peers(schedule: Schedule) -> None:
    holders: dict[int, tuple[int, set[int]]] = {}
    for rank in range(schedule.num_ranks):
        stages = {stage for _, stage in schedule.placement.stages_on(rank)}
        if not stages:
            raise ScheduleError(rank, "none", "this rank holds no stage")
        for stage in stages:
            peer, theirs = holders.setdefault(stage, (rank, stages))
            if theirs != stages:
                raise ScheduleError(
                    rank,
                    "none",
                    f"shares stage {stage} with rank {peer}, but holds others beside it",
                )


def _check_whole(schedule: Schedule) -> None:
    for rank, action in schedule.actions():
        is_part = action.segment is not None and action.kind not in _TRANSFER_KINDS
        if is_part or action.kind in _MEMORY_KINDS:
            raise ScheduleError(
                rank, action, "stages of a graph run whole, and keep what they save"
            )


def _check_places(schedule: Schedule) -> None:
    ranks = schedule.placement.ranks
    for rank, actions in enumerate(schedule.rank_schedules):
        seen: set[Action] = set()
        for action in actions:
            kind, stage, micro_batch, direction, _ = action
            if kind in _STAGE_KINDS:
                continue
            if not 0 <= stage < schedule.num_stages or not 0 <= direction < len(ranks):
                raise ScheduleError(rank, action, "no such stage or direction")
            if micro_batch is None or not 0 <= micro_batch < schedule.num_micro_batches:
                raise ScheduleError(
                    rank, action, f"micro-batches run from 0 to {schedule.num_micro_batches - 1}"
                )
            home = ranks[direction][stage]
            if home != rank:
                raise ScheduleError(
                    rank, action, f"stage {stage} in direction {direction} is on rank {home}"
                )
            num_seen = len(seen)
            seen.add(action)
            if len(seen) == num_seen:
                raise ScheduleError(rank, action, "stands in the list twice")


def _check_compute_is_whole(schedule: Schedule) -> None:
    remaining: set[tuple[object, ...]] = {
        action
        for actions in schedule.rank_schedules
        for action in actions
        if action[0] in _MADE_KINDS
    }
    directions = schedule.directions()
    if schedule.num_micro_batches % schedule.num_strips:
        fault = (
            f"{schedule.num_micro_batches} strips are no whole micro-batches of"
            f" {schedule.num_strips}"
        )
        raise ScheduleError(0, "none", fault)
    kinds = _kinds if any(map(schedule.has_any, _MEMORY_KINDS)) else _compute_kinds
    for m in range(schedule.num_micro_batches):
        if m not in directions:
            raise ScheduleError(
                schedule.placement.rank_of(0, 0), Action(Kind.F, 0, m), "is missing"
            )
        if directions[m] != directions[m - m % schedule.num_strips]:
            first = Action(Kind.F, 0, m, directions[m])
            raise ScheduleError(
                schedule.rank_of(first), first, "runs in another direction than strips before it"
            )
        for stage in range(schedule.num_stages):
            for segment in schedule.segments_of(stage):
                for kind in kinds(schedule, stage, m, directions[m], segment):
                    place = (kind, stage, m, directions[m], segment)
                    if place not in remaining:
                        expected = Action(*place)
                        raise ScheduleError(schedule.rank_of(expected), expected, "is missing")
                    remaining.discard(place)
    for action in sorted(
        action for actions in schedule.rank_schedules for action in actions if action in remaining
    ):
        raise ScheduleError(schedule.rank_of(action), action, "has no place in this step")


def _compute_kinds(
    schedule: Schedule, stage: int, micro_batch: int, direction: int, segment: int | None
) -> Sequence[Kind]:
    """Return the compute actions that a stage (or segment) and micro-batch need."""
    if schedule.forward_only:
        return (_F,)
    return _SPLIT if schedule.backward_kind(stage, micro_batch, direction) is _I else _WHOLE


def _kinds(
    schedule: Schedule, stage: int, micro_batch: int, direction: int, segment: int | None
) -> Sequence[Kind]:
    """Return the same with recomputation and copies."""
    kinds = list(_compute_kinds(schedule, stage, micro_batch, direction, segment))
    place = (stage, micro_batch, direction, segment)
    if schedule.forward_only:
        return kinds
    if schedule.has(Kind.R, *place):
        kinds.append(Kind.R)
        if segment is None:  # a whole stage's inputs are those that it is given, which stay
            return kinds
    kinds += [kind for kind in (Kind.FREE, Kind.AWAIT) if schedule.has(kind, *place)]
    if any(schedule.has(copy, *place) for copy in (*COPY_KINDS, *WAIT_KINDS)):
        kinds += [Kind.OFFLOAD, Kind.PREFETCH]
    return kinds


def _check_transfers(schedule: Schedule) -> None:
    remaining = {
        action
        for actions in schedule.rank_schedules
        for action in actions
        if action[0] in _TRANSFER_KINDS
    }
    for rank, action in schedule.actions() if schedule.has_transfers else ():
        for send, receive, there in transfers_after(action, schedule):
            if send not in remaining:
                raise ScheduleError(rank, action, f"its data is never sent: {send} is missing")
            if receive not in remaining:
                raise ScheduleError(
                    there, receive, f"is missing, the partner of {send} on rank {rank}"
                )
            remaining.discard(send)
            remaining.discard(receive)
    for action in sorted(remaining):
        raise ScheduleError(
            schedule.rank_of(action), action, "carries data that no rank makes or needs"
        )


def _check_order(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    position = {action: i for i, action in enumerate(actions)}
    nowhere = len(actions)
    for i, action in enumerate(actions):
        if action[0] in RECV_KINDS:
            continue
        for need in dependencies(action, schedule):
            if position.get(need, nowhere) > i and schedule.rank_of(need) == rank:
                raise ScheduleError(rank, action, f"comes before {need}, which it needs")


def _check_forwards(rank: int, actions: tuple[Action, ...]) -> None:
    last: dict[tuple[int, int, int | None], Action] = {}
    for action in actions:
        if action[0] is _F:
            before = last.get(place := (action.direction, action.stage, action.segment))
            if before is not None and (before.micro_batch or 0) > (action.micro_batch or 0):
                raise ScheduleError(
                    rank, action, f"comes after {before}, a later micro-batch of its stage"
                )
            last[place] = action


def _check_tail(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    tail = [(i, action) for i, action in enumerate(actions) if action.kind in RANK_KINDS]
    counts = Counter(action.kind for _, action in tail)
    index_of = {action: i for i, action in reversed(tail)}
    previous = max(
        (i for i, action in enumerate(actions) if action.kind in COMPUTE_KINDS), default=-1
    )
    for kind, name in ((Kind.REDUCE_GRAD, "add_reduce"), (Kind.STEP, "add_step")):
        action = Action(kind, schedule.placement.lowest_stage(rank))
        expected = int(name in schedule.passes)
        if counts[kind] != expected or (action in index_of) != bool(expected):
            raise ScheduleError(
                rank,
                action,
                f"must stand in the list {expected} times, and {kind} stands {counts[kind]} times",
            )
        if not expected:
            continue
        index = index_of[action]
        if index < previous:
            raise ScheduleError(
                rank, action, f"comes before {actions[previous]}, on which it rests"
            )
        previous = index


def _check_starts(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    if not schedule.has_any(Kind.START_REDUCE):
        return
    remaining = {stage for _, stage in schedule.placement.stages_on(rank)}
    last = {
        action.stage: (i, action)
        for i, action in enumerate(actions)
        if action.kind in COMPUTE_KINDS
    }
    end = next((i for i, action in enumerate(actions) if action.kind is Kind.REDUCE_GRAD), -1)
    for i, action in enumerate(actions):
        if action.kind is not Kind.START_REDUCE:
            continue
        if schedule.num_directions > 1:
            raise ScheduleError(rank, action, "sums start early only in one direction")
        if action.stage not in remaining or action != Action(Kind.START_REDUCE, action.stage):
            raise ScheduleError(rank, action, "must name a stage of this rank, and that once")
        if i > end:
            raise ScheduleError(
                rank, action, "comes after the reduction that waits for it, or there is none"
            )
        if i < last[action.stage][0]:
            raise ScheduleError(
                rank, action, f"comes before {last[action.stage][1]}, on which it rests"
            )
        remaining.discard(action.stage)

"""Validation: refuses a schedule that would not run, and names the rank and the action at fault."""

from __future__ import annotations

from collections import Counter

from gems.errors import ScheduleError
from gems.schedule.action import COMPUTE_KINDS, RANK_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, transfer_after
from gems.schedule.replay import replay, uniform_cost
from gems.schedule.schedule import Schedule


def validate(schedule: Schedule) -> Schedule:
    """Checks a compute-only or lowered schedule and gives it back.

    Held: every stage of every micro-batch runs forward (and backward) once, on the rank that holds it and in one
    direction; nothing runs before its data; each transfer has its partner and each need its transfer; the
    gradients are reduced after the last backward and the step follows; peers reduce the same stages; no rank
    waits for ever, with sends that complete only against a posted receive.

    Raises:
        ScheduleError: names the first fault.
    """
    if len(schedule.rows) != schedule.num_ranks:
        raise ScheduleError(
            len(schedule.rows), "none", f"{len(schedule.rows)} rows for {schedule.num_ranks} ranks"
        )
    _check_peers(schedule)
    _check_places(schedule)
    _check_compute_is_whole(schedule)
    _check_transfers(schedule)
    for rank, row in enumerate(schedule.rows):
        _check_order(schedule, rank, row)
        _check_tail(schedule, rank, row)
    replay(schedule, uniform_cost(1.0, 2.0))
    return schedule


def _check_peers(schedule: Schedule) -> None:
    held: dict[int, tuple[int, set[int]]] = {}
    for rank in range(schedule.num_ranks):
        stages = {stage for _, stage in schedule.placement.stages_on(rank)}
        if not stages:
            raise ScheduleError(rank, "none", "this rank holds no stage")
        for stage in stages:
            peer, theirs = held.setdefault(stage, (rank, stages))
            if theirs != stages:
                raise ScheduleError(
                    rank, "none", f"shares stage {stage} with rank {peer}, but holds others beside it"
                )


def _check_places(schedule: Schedule) -> None:
    seen: set[Action] = set()
    for rank, action in schedule.actions():
        if action.kind in RANK_KINDS:
            continue
        if not 0 <= action.stage < schedule.num_stages or not 0 <= action.direction < schedule.num_directions:
            raise ScheduleError(rank, action, "no such stage or direction")
        if action.micro_batch is None or not 0 <= action.micro_batch < schedule.num_micro_batches:
            raise ScheduleError(rank, action, f"micro-batches run from 0 to {schedule.num_micro_batches - 1}")
        home = schedule.rank_of(action)
        if home != rank:
            raise ScheduleError(
                rank, action, f"stage {action.stage} in direction {action.direction} is on rank {home}"
            )
        if action in seen:
            raise ScheduleError(rank, action, "stands in the list twice")
        seen.add(action)


def _check_compute_is_whole(schedule: Schedule) -> None:
    computed = {action for _, action in schedule.actions() if action.kind in COMPUTE_KINDS}
    directions = schedule.directions()
    kinds = (Kind.F,) if schedule.forward_only else (Kind.F, Kind.B)
    for m in range(schedule.num_micro_batches):
        if m not in directions:
            raise ScheduleError(schedule.placement.rank_of(0, 0), Action(Kind.F, 0, m), "is missing")
        for stage in range(schedule.num_stages):
            for kind in kinds:
                expected = Action(kind, stage, m, directions[m])
                if expected not in computed:
                    raise ScheduleError(schedule.rank_of(expected), expected, "is missing")
                computed.discard(expected)
    for action in sorted(computed):
        raise ScheduleError(schedule.rank_of(action), action, "has no place in this step")


def _check_transfers(schedule: Schedule) -> None:
    present = {action for _, action in schedule.actions() if action.kind in SEND_KINDS | RECV_KINDS}
    for rank, action in schedule.actions():
        transfer = transfer_after(action, schedule) if schedule.has_transfers else None
        if transfer is None:
            continue
        send, receive, there = transfer
        if send not in present:
            raise ScheduleError(rank, action, f"its data is never sent: {send} is missing")
        if receive not in present:
            raise ScheduleError(there, receive, f"is missing, the partner of {send} on rank {rank}")
        present -= {send, receive}
    for action in sorted(present):
        raise ScheduleError(schedule.rank_of(action), action, "carries data that no rank makes or needs")


def _check_order(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> None:
    position = {action: i for i, action in enumerate(row)}
    for i, action in enumerate(row):
        if action.kind in RECV_KINDS:
            continue
        for need in dependencies(action, schedule):
            if schedule.rank_of(need) == rank and position.get(need, len(row)) > i:
                raise ScheduleError(rank, action, f"comes before {need}, which it needs")


def _check_tail(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> None:
    counts = Counter(action.kind for action in row)
    last_compute = max((i for i, action in enumerate(row) if action.kind in COMPUTE_KINDS), default=-1)
    previous = last_compute
    for kind, name in ((Kind.REDUCE_GRAD, "add_reduce"), (Kind.STEP, "add_step")):
        action = Action(kind, schedule.placement.lowest_stage(rank))
        expected = int(name in schedule.passes)
        if counts[kind] != expected or row.count(action) != expected:
            raise ScheduleError(
                rank,
                action,
                f"must stand in the list {expected} times, and {kind} stands {counts[kind]} times",
            )
        if not expected:
            continue
        index = row.index(action)
        if index < previous:
            raise ScheduleError(rank, action, f"comes before {row[previous]}, on which it rests")
        previous = index

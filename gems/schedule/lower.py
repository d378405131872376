"""Lowering: from compute actions to the list that the executor runs."""

from __future__ import annotations

from dataclasses import replace

from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, transfer_after
from gems.schedule.schedule import Schedule

RECEIVES_AHEAD = 1


def add_transfers(schedule: Schedule, receives_ahead: int = RECEIVES_AHEAD) -> Schedule:
    """Inserts sends behind the compute whose data they carry, and receives ahead of the compute that needs it.

    A receive only posts a buffer, so it stands `receives_ahead` compute actions early: a message then finds its
    buffer while the rank still computes. More would only hold more buffers.
    """
    posted = replace(schedule, passes=(*schedule.passes, "add_transfers"))
    rows = []
    for row in schedule.rows:
        receives = [
            [need for need in dependencies(action, posted) if need.kind in (Kind.RECV_F, Kind.RECV_B)]
            for action in row
        ]
        lowered: list[Action] = [receive for needed in receives[:receives_ahead] for receive in needed]
        for i, action in enumerate(row):
            lowered += [
                receive
                for needed in receives[i + receives_ahead : i + receives_ahead + 1]
                for receive in needed
            ]
            lowered.append(action)
            transfer = transfer_after(action, schedule)
            if transfer is not None:
                lowered.append(transfer[0])
        rows.append(tuple(lowered))
    return replace(posted, rows=tuple(rows))


def add_reduce(schedule: Schedule) -> Schedule:
    """Appends to every rank the one fused reduction of the gradients that it holds."""
    return _append(schedule, Kind.REDUCE_GRAD, "add_reduce")


def add_step(schedule: Schedule) -> Schedule:
    """Appends to every rank the optimizer step."""
    return _append(schedule, Kind.STEP, "add_step")


def _append(schedule: Schedule, kind: Kind, name: str) -> Schedule:
    rows = tuple(
        (*row, Action(kind, schedule.placement.lowest_stage(rank))) for rank, row in enumerate(schedule.rows)
    )
    return replace(schedule, rows=rows, passes=(*schedule.passes, name))


def lower(schedule: Schedule) -> Schedule:
    """Runs all passes: transfers, and for training the gradient reduction and the step."""
    lowered = add_transfers(schedule)
    return lowered if schedule.forward_only else add_step(add_reduce(lowered))


def compute_only(schedule: Schedule) -> Schedule:
    """Takes all but the compute actions out again, for drawings and exports."""
    rows = tuple(tuple(a for a in row if a.kind in COMPUTE_KINDS) for row in schedule.rows)
    return replace(schedule, rows=rows, passes=())

"""Lowering: from compute actions to the list that the executor runs."""

from __future__ import annotations

from dataclasses import replace

from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, WAIT_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, transfer_after
from gems.schedule.schedule import Schedule

RECEIVES_AHEAD = 1
MADE_KINDS = COMPUTE_KINDS | COPY_KINDS | WAIT_KINDS


def add_transfers(schedule: Schedule, receives_ahead: int = RECEIVES_AHEAD) -> Schedule:
    """Inserts sends behind the compute whose data they carry, and receives ahead of the compute that needs it.

    A receive only posts a buffer, so it stands `receives_ahead` compute actions early: a message then finds its
    buffer while the rank still computes. More would only hold more buffers.
    """
    posted = replace(schedule, passes=(*schedule.passes, "add_transfers"))
    rows = []
    for row in schedule.rows:
        receives = [
            [need for need in dependencies(action, posted) if need.kind in RECV_KINDS] for action in row
        ]
        receives += [[]] * receives_ahead
        lowered = [receive for needed in receives[:receives_ahead] for receive in needed]
        for action, needed in zip(row, receives[receives_ahead:], strict=True):
            lowered += needed
            lowered.append(action)
            transfer = transfer_after(action, schedule)
            if transfer is not None:
                lowered.append(transfer[0])
        rows.append(tuple(lowered))
    return _more(posted, tuple(rows), posted.passes)


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
    return _more(schedule, rows, (*schedule.passes, name))


def _more(schedule: Schedule, rows: tuple[tuple[Action, ...], ...], passes: tuple[str, ...]) -> Schedule:
    """Gives the schedule with rows that hold more; what its actions need is the same, and not looked for again."""
    more = replace(schedule, rows=rows, passes=passes)
    more.needs.update(schedule.needs)
    return more


def lower(schedule: Schedule) -> Schedule:
    """Runs all passes: transfers, and for training the gradient reduction and the step."""
    lowered = add_transfers(schedule)
    return lowered if schedule.forward_only else add_step(add_reduce(lowered))


def compute_only(schedule: Schedule) -> Schedule:
    """Takes out again what lowering put in: all but the compute actions and what copies to host memory."""
    rows = tuple(tuple(a for a in row if a.kind in MADE_KINDS) for row in schedule.rows)
    return replace(schedule, rows=rows, passes=())

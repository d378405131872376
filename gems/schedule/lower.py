"""Lowering: from compute actions to the list that the executor runs."""

from __future__ import annotations

from dataclasses import replace

from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, WAIT_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, transfers_after
from gems.schedule.schedule import Schedule

RECEIVES_AHEAD = 1
GRAPH_RECEIVES_AHEAD = 8  # stages of a graph are single operators
MADE_KINDS = COMPUTE_KINDS | COPY_KINDS | WAIT_KINDS


def add_transfers(schedule: Schedule, receives_ahead: int | None = None) -> Schedule:
    """Insert sends after the compute whose data they carry, and receives ahead of the compute that needs it.

    A receive only posts a buffer, so it comes `receives_ahead` compute actions early: a message then finds its
    buffer while the rank still computes. More would only hold more buffers. Without a number it is 1 in a chain, 8 in
    a graph of stages, where several actions may need what one receive brings: it comes ahead of the first.
    """
    is_graph = schedule.placement.feeders is not None
    if receives_ahead is None:
        receives_ahead = GRAPH_RECEIVES_AHEAD if is_graph else RECEIVES_AHEAD
    posted = replace(schedule, passes=(*schedule.passes, "add_transfers"))
    rows = []
    for row in schedule.rows:
        receives = [[need for need in dependencies(action, posted) if need.kind in RECV_KINDS] for action in row]
        if is_graph:  # of a receive that several actions need the first place stays
            first: dict[Action, int] = {}
            for i, some in enumerate(receives):
                receives[i] = [one for one in some if first.setdefault(one, i) == i]
        receives += [[]] * receives_ahead
        lowered = [receive for needed in receives[:receives_ahead] for receive in needed]
        for action, needed in zip(row, receives[receives_ahead:], strict=True):
            lowered += needed
            lowered.append(action)
            lowered += [send for send, _, _ in transfers_after(action, schedule)]
        rows.append(tuple(lowered))
    return _with_needs(posted, tuple(rows), posted.passes)


def lower(schedule: Schedule) -> Schedule:
    """Run all passes: transfers, and for training one fused gradient reduction of each rank and the optimizer step."""
    lowered = add_transfers(schedule)
    if schedule.forward_only:
        return lowered
    rows = []
    for rank, row in enumerate(lowered.rows):
        stage = schedule.placement.lowest_stage(rank)
        rows.append((*row, Action(Kind.REDUCE_GRAD, stage), Action(Kind.STEP, stage)))
    return _with_needs(lowered, tuple(rows), (*lowered.passes, "add_reduce", "add_step"))


def _with_needs(schedule: Schedule, rows: tuple[tuple[Action, ...], ...], passes: tuple[str, ...]) -> Schedule:
    """Return the schedule with rows that hold more; what its actions need is the same, and not derived again."""
    more = replace(schedule, rows=rows, passes=passes)
    more.needs.update(schedule.needs)
    return more


def compute_only(schedule: Schedule) -> Schedule:
    """Take out again what lowering put in: all but the compute actions and what copies to host memory."""
    rows = tuple(tuple(a for a in row if a.kind in MADE_KINDS) for row in schedule.rows)
    return replace(schedule, rows=rows, passes=())

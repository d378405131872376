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
    """Insert sends behind the compute whose data they carry, and receives ahead of the compute that needs it.

    A receive only posts a buffer, so it stands `receives_ahead` compute actions early: a message then finds its
    buffer while the rank still computes. More would only hold more buffers. Without a number it is 1 in a chain, 8 in
    a graph of stages, where several actions may need what one receive brings: it stands ahead of the first.
    """
    is_graph = schedule.placement.feeders is not None
    if receives_ahead is None:
        receives_ahead = GRAPH_RECEIVES_AHEAD if is_graph else RECEIVES_AHEAD
    posted = replace(schedule, passes=(*schedule.passes, "add_transfers"))
    rows = []
    for row in schedule.rows:
        receives = [[need for need in dependencies(action, posted) if need.kind in RECV_KINDS] for action in row]
        if is_graph:
            receives = _first_of_each(receives)
        receives += [[]] * receives_ahead
        lowered = [receive for needed in receives[:receives_ahead] for receive in needed]
        for action, needed in zip(row, receives[receives_ahead:], strict=True):
            lowered += needed
            lowered.append(action)
            lowered += [send for send, _, _ in transfers_after(action, schedule)]
        rows.append(tuple(lowered))
    return _more(posted, tuple(rows), posted.passes)


def _first_of_each(receives: list[list[Action]]) -> list[list[Action]]:
    """Keep of a receive that several actions need the first place."""
    seen: set[Action] = set()
    kept = []
    for some in receives:
        kept.append([receive for receive in some if receive not in seen])
        seen.update(some)
    return kept


def add_reduce(schedule: Schedule) -> Schedule:
    """Append to every rank the one fused reduction of the gradients that it holds."""
    return _append(schedule, Kind.REDUCE_GRAD, "add_reduce")


def add_step(schedule: Schedule) -> Schedule:
    """Append to every rank the optimizer step."""
    return _append(schedule, Kind.STEP, "add_step")


def _append(schedule: Schedule, kind: Kind, name: str) -> Schedule:
    rows = tuple((*row, Action(kind, schedule.placement.lowest_stage(rank))) for rank, row in enumerate(schedule.rows))
    return _more(schedule, rows, (*schedule.passes, name))


def _more(schedule: Schedule, rows: tuple[tuple[Action, ...], ...], passes: tuple[str, ...]) -> Schedule:
    """Return the schedule with rows that hold more; what its actions need is the same, and not looked for again."""
    more = replace(schedule, rows=rows, passes=passes)
    more.needs.update(schedule.needs)
    return more


def lower(schedule: Schedule) -> Schedule:
    """Run all passes: transfers, and for training the gradient reduction and the step."""
    lowered = add_transfers(schedule)
    return lowered if schedule.forward_only else add_step(add_reduce(lowered))


def compute_only(schedule: Schedule) -> Schedule:
    """Take out again what lowering put in: all but the compute actions and what copies to host memory."""
    rows = tuple(tuple(a for a in row if a.kind in MADE_KINDS) for row in schedule.rows)
    return replace(schedule, rows=rows, passes=())

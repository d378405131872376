"""What must be complete before an action may start. Every other part asks here; nobody else knows."""

from __future__ import annotations

from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.schedule import Schedule


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Gives the actions whose data `action` needs.

    A receive needs the send that it pairs with, whose data the message carries. REDUCE_GRAD needs every backward
    of its own rank, which precedes it in the list, so only those of other ranks would be named: there are none.
    """
    kind = action.kind
    if kind is Kind.F:
        return (
            ()
            if action.stage == 0
            else (_from_stage(action, action.stage - 1, Kind.F, Kind.RECV_F, schedule),)
        )
    if kind is Kind.B:
        own = Action(Kind.F, action.stage, action.micro_batch, action.direction)
        if action.stage == schedule.num_stages - 1:
            return (own,)
        return (own, _from_stage(action, action.stage + 1, Kind.B, Kind.RECV_B, schedule))
    if kind is Kind.SEND_F:
        return (Action(Kind.F, action.stage, action.micro_batch, action.direction),)
    if kind is Kind.SEND_B:
        return (Action(Kind.B, action.stage, action.micro_batch, action.direction),)
    if kind is Kind.RECV_F:
        return (Action(Kind.SEND_F, action.stage - 1, action.micro_batch, action.direction),)
    if kind is Kind.RECV_B:
        return (Action(Kind.SEND_B, action.stage + 1, action.micro_batch, action.direction),)
    return ()


def _from_stage(action: Action, other: int, compute: Kind, receive: Kind, schedule: Schedule) -> Action:
    """Names the neighbour's compute, or the receive of its data where transfers are in the list."""
    placement = schedule.placement
    same_rank = placement.rank_of(action.direction, other) == placement.rank_of(
        action.direction, action.stage
    )
    if schedule.has_transfers and not same_rank:
        return Action(receive, action.stage, action.micro_batch, action.direction)
    return Action(compute, other, action.micro_batch, action.direction)


def transfer_after(action: Action, schedule: Schedule) -> tuple[Action, Action, int] | None:
    """Gives the send and the receive that carry what a compute action makes, and the receiving rank.

    None where the data stays on its rank or nothing follows.
    """
    if action.kind not in COMPUTE_KINDS:
        return None
    if action.kind is Kind.F:
        other, send, receive = action.stage + 1, Kind.SEND_F, Kind.RECV_F
    else:
        other, send, receive = action.stage - 1, Kind.SEND_B, Kind.RECV_B
    if not 0 <= other < schedule.num_stages:
        return None
    here = schedule.rank_of(action)
    there = schedule.placement.rank_of(action.direction, other)
    if here == there:
        return None
    return (
        Action(send, action.stage, action.micro_batch, action.direction),
        Action(receive, other, action.micro_batch, action.direction),
        there,
    )

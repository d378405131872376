"""What must be complete before an action may start. Every other part asks here; nobody else knows."""

from __future__ import annotations

from gems.schedule import stage_graph
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule
from gems.schedule.transfers import partner_of

_SAME = {
    Kind.W: Kind.I, Kind.R: Kind.F, Kind.OFFLOAD: Kind.F, Kind.FREE: Kind.OFFLOAD, Kind.AWAIT: Kind.PREFETCH,
}  # fmt: skip


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions whose data `action` needs.

    A receive needs the send that it pairs with, whose data the message carries. REDUCE_GRAD needs every backward
    of its own rank, which precedes it in the list, so only those of other ranks would be named: there are none.
    Segments of a stage run one after the other, forward from its first and backward from its last.
    """
    found = schedule.needs.get(action)
    if found is None:
        found = schedule.needs[action] = _find(action, schedule)
    return found


def _find(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    kind, stage, micro_batch, direction, segment = action
    if schedule.placement.feeders is not None:
        return stage_graph.needs(action, schedule.placement, schedule.has_transfers)
    if kind in _SAME:
        return (_named(_SAME[kind], stage, micro_batch, direction, segment),)
    if kind is Kind.F:
        if segment:
            return (_named(kind, stage, micro_batch, direction, segment - 1),)
        return () if stage == 0 else (_from_stage(action, stage - 1, Kind.F, Kind.RECV_F, schedule),)
    if kind is Kind.B or kind is Kind.I:
        own = _named(_source_of_activations(action, schedule), stage, micro_batch, direction, segment)
        if segment is not None and segment != schedule.last_segment(stage):
            return (own, _named(kind, stage, micro_batch, direction, segment + 1))
        if stage == schedule.num_stages - 1:
            return (own,)
        made_by = schedule.backward_kind(stage + 1, micro_batch, direction)
        return (own, _from_stage(action, stage + 1, made_by, Kind.RECV_B, schedule))
    if kind is Kind.PREFETCH:
        is_waited_for = schedule.has(Kind.FREE, stage, micro_batch, direction, segment)
        before = Kind.FREE if is_waited_for else Kind.OFFLOAD
        return (_named(before, stage, micro_batch, direction, segment),)
    if kind is Kind.SEND_F:
        return (_named(Kind.F, stage, micro_batch, direction, schedule.last_segment(stage)),)
    if kind is Kind.SEND_B:
        made_by = schedule.backward_kind(stage, micro_batch, direction)
        return (_named(made_by, stage, micro_batch, direction, schedule.first_segment(stage)),)
    if kind is Kind.RECV_F:
        return (_named(Kind.SEND_F, stage - 1, micro_batch, direction),)
    if kind is Kind.RECV_B:
        return (_named(Kind.SEND_B, stage + 1, micro_batch, direction),)
    return ()


def _named(kind: Kind, stage: int, micro_batch: int | None, direction: int, segment: int | None = None) -> Action:
    """Build an action; the constructor of a named tuple takes three times as long."""
    return tuple.__new__(Action, (kind, stage, micro_batch, direction, segment))


def _source_of_activations(action: Action, schedule: Schedule) -> Kind:
    """Return what last brought the stash that a backward reads: forward, recomputation or the copy back."""
    _, stage, micro_batch, direction, segment = action
    for kind in (Kind.R, Kind.PREFETCH):
        if schedule.has_any(kind) and schedule.has(kind, stage, micro_batch, direction, segment):
            return kind
    return Kind.F


def _from_stage(action: Action, other: int, compute: Kind, receive: Kind, schedule: Schedule) -> Action:
    """Name the neighbour's compute, or the receive of its data where transfers are in the list."""
    _, stage, micro_batch, direction, _ = action
    ranks = schedule.placement.ranks[direction]
    if schedule.has_transfers and ranks[other] != ranks[stage]:
        return _named(receive, stage, micro_batch, direction)
    is_before = compute is Kind.F
    segment = schedule.last_segment(other) if is_before else schedule.first_segment(other)
    return _named(compute, other, micro_batch, direction, segment)


def transfers_after(action: Action, schedule: Schedule) -> tuple[tuple[Action, Action, int], ...]:
    """Return, for each transfer that carries what a compute action makes, its send, its receive and the receiving rank.

    In a chain there is one at most; in a graph of stages one for each rank that reads it.
    """
    placement = schedule.placement
    if placement.feeders is None:
        transfer = transfer_after(action, schedule)
        return () if transfer is None else (transfer,)
    sends = stage_graph.sends_after(action, placement)
    receives = map(partner_of, sends)
    return tuple(
        (send, receive, placement.rank_of(receive.direction, receive.stage))
        for send, receive in zip(sends, receives, strict=True)
    )


def transfer_after(action: Action, schedule: Schedule) -> tuple[Action, Action, int] | None:
    """Return the send and the receive that carry what a compute action of a chain makes, and the receiving rank.

    None where the data stays on its rank or nothing follows.
    """
    kind, stage, micro_batch, direction, segment = action
    if kind is Kind.F:
        at_end = schedule.last_segment(stage)
        other, send, receive = stage + 1, Kind.SEND_F, Kind.RECV_F
    elif kind is Kind.B or kind is Kind.I:
        at_end = schedule.first_segment(stage)
        other, send, receive = stage - 1, Kind.SEND_B, Kind.RECV_B
    else:
        return None
    if segment != at_end or not 0 <= other < schedule.num_stages:
        return None
    ranks = schedule.placement.ranks[direction]
    there = ranks[other]
    if ranks[stage] == there:
        return None
    return (_named(send, stage, micro_batch, direction), _named(receive, other, micro_batch, direction), there)
